"""Quiet Ctrl-C during imports: the process ends at once, without a traceback.

Imports no slow module, because it runs before all other imports.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGINT  # the exit code in a shell of a command that Ctrl-C ended


@contextmanager
def quiet_sigint() -> Iterator[None]:
    """Let SIGINT end the process as SIGTERM does, instead of raising KeyboardInterrupt.

    For code without anything to clean up. Call it on the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # SIGINT is ignored, as under nohup, or a library handles it
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
