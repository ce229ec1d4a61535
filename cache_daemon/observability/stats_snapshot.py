"""Snapshots of the daemon's statistics for other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable

from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.observability.call_metrics import CallMetrics
from cache_daemon.observability.reuse_metrics import ReuseMetrics

_TIMEOUT_SECONDS = 5.0


class StatsSnapshots:
    """Statistics of the daemon for other threads.

    ``read_stats`` runs on ``loop``, which must not be the caller's thread. ``calls`` and ``reuse`` may be read from any
    thread.
    """

    def __init__(
        self,
        read_stats: Callable[[], StatsResponse],
        calls: CallMetrics,
        reuse: ReuseMetrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.calls, self.reuse, self._read_stats, self._loop = calls, reuse, read_stats, loop

    def take(self) -> StatsResponse:
        """Return the current statistics. Raises TimeoutError when the loop does not answer."""

        async def read() -> StatsResponse:
            return self._read_stats()

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            return reading.result(_TIMEOUT_SECONDS)
        except concurrent.futures.TimeoutError:
            reading.cancel()
            raise TimeoutError(f"the daemon's event loop did not answer within {_TIMEOUT_SECONDS:g} s") from None
