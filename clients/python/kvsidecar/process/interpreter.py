"""Builds command lines for this Python interpreter."""

from __future__ import annotations

import sys


def python_command(*arguments: str) -> list[str]:
    """Return the command line of a KVSidecar process; arguments are ``-m``, ``MODULE``, flags.

    ``-P`` keeps the current folder out of ``sys.path``: otherwise a clone named ``kvsidecar`` there, or any module with
    the name of an imported one, would be imported instead.
    """
    return [sys.executable, "-P", *arguments]
