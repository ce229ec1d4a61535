"""Ctrl-C while modules are imported: the process ends at once and quietly, instead of with a traceback of the import.

Imports nothing that takes time: it comes before what does.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGINT  # what a shell shows for a command that Ctrl-C ended


@contextmanager
def ending_quietly() -> Iterator[None]:
    """SIGINT ends the process as SIGTERM does, where Python would raise KeyboardInterrupt; for code that has nothing to
    put in order. Call it on the main thread."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as under nohup, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
