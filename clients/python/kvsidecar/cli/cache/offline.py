"""``kvsidecar cache verify``, ``export`` and ``import``: offline operations on a store.

They need no running daemon, and run as a program of the daemon's package.
"""

from __future__ import annotations

import os
import sys

import typer

from kvsidecar.process.interpreter import python_command

_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_COMMANDS = {
    "verify": "Read a whole store of a stopped daemon, and repair it.",
    "export": "Write a daemon's chunks, running or stopped, to a portable archive.",
    "import": "Take an archive's chunks into a store.",
}


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for name, text in _COMMANDS.items():
        app.command(name, context_settings=_PASS_ON, help=text)(_handed_over)


def _handed_over(context: typer.Context) -> None:
    command = python_command("-m", "cache_daemon.offline", str(context.info_name), *context.args)
    os.execv(sys.executable, command)
