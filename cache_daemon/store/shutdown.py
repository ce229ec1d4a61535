"""Shutdown of a store: runs blocking calls on threads, with one common deadline."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import structlog

# Deadlines, in seconds after the start of the shutdown: for everything, for queued writes, and for the end of the
# writer thread.
SECONDS, SETTLE_SECONDS, WRITE_SECONDS = 20.0, 14.0, 18.0

log = structlog.get_logger("cache_daemon")


class Shutdown:
    """A common deadline for several pieces of blocking work.

    Each piece runs on a daemon thread, which does not delay the exit of the process.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.late = False
        """True once a piece of work has outlived the deadline."""

    @property
    def to_settle(self) -> float:
        """Seconds left for queued writes."""
        return self._left(SETTLE_SECONDS)

    @property
    def to_write(self) -> float:
        """Seconds left for the writer thread to end."""
        return self._left(WRITE_SECONDS)

    def _left(self, of_seconds: float) -> float:
        return max(0.1, self._began + of_seconds - time.monotonic())

    async def run(self, work: Callable[[], object]) -> object:
        """Run blocking work; return None when it does not end in time.

        Raises the exception of the work.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        outcome: list[object] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                raised.append(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run, name="store-end", daemon=True).start()
        try:
            async with asyncio.timeout(self._left(SECONDS)):
                await ended.wait()
        except TimeoutError:
            self.late = True
            log.error("the store did not close in time", waits_for=getattr(work, "__qualname__", repr(work)))
            return None
        if raised:
            raise raised[0]
        return outcome[0]
