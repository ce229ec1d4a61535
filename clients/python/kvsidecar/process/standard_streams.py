"""Standard streams of a process that was started without them (``0<&-``).

Imports no slow module, because it runs before all other imports.
"""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null as standard input, output and error where they are closed, for child processes, too.

    Otherwise the first sockets get their numbers: text for standard error then reaches a client, and libuv aborts the
    process when it closes such a socket. Call it before any library opens a descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - open until the process ends
