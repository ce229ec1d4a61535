"""Hedged reads: duplicate a late read on another connection; the first answer wins.

Dean and Barroso, "The Tail at Scale", CACM 2013.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cache_daemon.remote.backend import RemoteFailed

# At most this share of all reads is duplicated, so that an overloaded backend does not get twice the load. The second
# number limits how many unused duplicates accumulate.
_HEDGE_SHARE, _MAX_CREDIT = 0.1, 4.0

T = TypeVar("T")


class HedgedReads:
    """Duplicates slow reads over ``lanes`` independent connections; with one lane, duplicates nothing."""

    def __init__(self, lanes: int) -> None:
        self._lanes, self._saved, self._next = lanes, _MAX_CREDIT, 0
        self.num_hedged = 0

    async def first_result(self, work: Callable[[int], Awaitable[T]], hedge_after_seconds: float) -> T:
        """Return the first answer of ``work``, which gets the number of a lane.

        A second read starts after ``hedge_after_seconds``. Raises the exception of ``work`` if all reads failed, and
        RemoteFailed if the work was cancelled but the caller was not.
        """
        self._saved = min(_MAX_CREDIT, self._saved + _HEDGE_SHARE)
        lane = self._next = (self._next + 1) % self._lanes
        running = {asyncio.ensure_future(work(lane))}
        try:
            done, _ = await asyncio.wait(running, timeout=hedge_after_seconds)
            if not done and self._lanes > 1 and self._saved >= 1:
                self._saved -= 1
                self.num_hedged += 1
                running.add(asyncio.ensure_future(work((lane + 1) % self._lanes)))
            while True:
                done, waiting = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                good = next((task for task in done if _failure(task) is None), None)
                if good is not None:
                    return good.result()
                if not waiting:
                    raise next(filter(None, map(_failure, done)))
                running = waiting
        finally:
            for task in running:
                task.cancel()
                task.add_done_callback(_consume_exception)


def _failure(task: asyncio.Future[Any]) -> BaseException | None:
    """Return the exception of finished work.

    Cancelled work counts as failed, since the caller did not cancel it.
    """
    return RemoteFailed("it gave a call up") if task.cancelled() else task.exception()


def _consume_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of the slower read, which no caller awaits."""
    if not task.cancelled():
        task.exception()
