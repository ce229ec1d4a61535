"""Builds command lines for this Python interpreter."""

from __future__ import annotations

import sys


def python_command(*arguments: str) -> list[str]:
    """Return the command line of a KVSidecar process; arguments are ``-m``, ``MODULE``, flags.

    ``-P`` keeps the current folder out of ``sys.path``. Otherwise a clone named ``kvsidecar`` in that folder, or any
    module with the name of an imported module, would be imported instead.
    """
    return [sys.executable, "-P", *arguments]
