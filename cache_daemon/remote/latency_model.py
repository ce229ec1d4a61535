"""Latency model of the remote tier, and hedged reads by it.

The time until a small answer comes, and bytes per second after that. Old measurements fade by the number of new ones,
not by time: a backend that is not used is not known to have changed. So somewhat often a measurement is needed while
nothing is read because it would be too slow.

Hedged reads: Dean and Barroso, "The Tail at Scale", CACM 2013.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cache_daemon.remote.backend import RemoteFailed

# Faster answers weigh more than slower ones: an answer is late for many reasons, and early for one.
_SLOWER_WEIGHT, _FASTER_WEIGHT = 0.2, 0.5
# Smaller transfers say nothing about the bandwidth.
_MIN_TRANSFER_BYTES = 256 << 10
_MAX_BYTES_PER_SECOND = 1e12

# At most a tenth of all reads is duplicated, so that a backend that is slow for want of capacity does not get twice the
# load; unused duplicates are saved up to the second number.
_HEDGE_SHARE, _MAX_CREDIT = 0.1, 4.0

T = TypeVar("T")


class LatencyModel:
    """Running means. Before the first measurement reads are assumed to be free."""

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0  # 0: not known
        self.latency_measured_at = float("-inf")  # when the latency was measured, monotonic seconds
        self.bandwidth_measured_at = float("-inf")  # when the bandwidth was

    def record_round_trip(self, seconds: float, size_bytes: int = 0) -> None:
        """Record a small answer."""
        spent = max(0.0, seconds - self._transfer_seconds(size_bytes))
        weight = _FASTER_WEIGHT if spent < self.latency_seconds else _SLOWER_WEIGHT
        known = self.latency_measured_at > float("-inf")
        self.latency_seconds = self.latency_seconds + weight * (spent - self.latency_seconds) if known else spent
        self.latency_measured_at = time.monotonic()

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        """Record a transfer of payloads, from the request to the last byte."""
        if size_bytes < _MIN_TRANSFER_BYTES:
            return
        rate = min(_MAX_BYTES_PER_SECOND, size_bytes / max(seconds - self.latency_seconds, seconds / 10, 1e-9))
        weight = _FASTER_WEIGHT if rate > self.bytes_per_second else _SLOWER_WEIGHT
        known = self.bytes_per_second > 0
        self.bytes_per_second = self.bytes_per_second + weight * (rate - self.bytes_per_second) if known else rate
        self.bandwidth_measured_at = time.monotonic()

    def record_timeout(self, seconds: float) -> None:
        """Record that a small answer had not come after ``seconds``."""
        self.latency_seconds = max(self.latency_seconds, seconds)

    def estimate_seconds(self, size_bytes: int, round_trips: int = 1) -> float:
        """Estimate the time to read ``size_bytes``."""
        return round_trips * self.latency_seconds + self._transfer_seconds(size_bytes)

    def _transfer_seconds(self, size_bytes: int) -> float:
        return size_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def reset_latency(self) -> None:
        """Forget the latency: the backend was away."""
        self.latency_seconds, self.latency_measured_at = 0.0, float("-inf")


class HedgedReads:
    """Duplicates slow reads over ``lanes`` independent connections; with one lane nothing is duplicated."""

    def __init__(self, lanes: int) -> None:
        self._lanes, self._saved, self._next = lanes, _MAX_CREDIT, 0
        self.num_hedged = 0

    async def first_result(self, work: Callable[[int], Awaitable[T]], hedge_after_seconds: float) -> T:
        """Return the first answer of ``work``, which is called with a lane.

        A second read starts after ``hedge_after_seconds``. Raises what the work raised when all of it did, and
        RemoteFailed where the work was cancelled and the caller was not.
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
    """Return the exception of finished work; cancelled work has failed, since the caller did not cancel it."""
    return RemoteFailed("it gave a call up") if task.cancelled() else task.exception()


def _consume_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of the slower read, which has no other reader."""
    if not task.cancelled():
        task.exception()
