"""Command lines for this Python interpreter."""

from __future__ import annotations

import sys


def python_command(*arguments: str) -> list[str]:
    """The command line of a process of ours; arguments are as in ``-m``, ``MODULE``, flags.

    ``-P`` keeps the current folder out of ``sys.path``: a clone there that is named ``kvsidecar``, or a module with the
    name of one that a process of ours imports, would be taken for it.
    """
    return [sys.executable, "-P", *arguments]
