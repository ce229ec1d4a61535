"""The daemon's statistics, read from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures

from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.rpc.servicer_base import ServiceState

_TIMEOUT_SECONDS = 5.0


class StatsSnapshots:
    """Reads on the store's own loop, which must not be the caller's thread."""

    def __init__(self, shared: ServiceState, loop: asyncio.AbstractEventLoop) -> None:
        self.shared, self._loop = shared, loop

    def take(self) -> StatsResponse:
        """The statistics now. Raises TimeoutError when the loop does not answer."""

        async def read() -> StatsResponse:
            stats = self.shared.store.stats()
            stats.loop_stall_ms, stats.refused = self.shared.stall_ms(), self.shared.calls.refused
            return stats

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            return reading.result(_TIMEOUT_SECONDS)
        except concurrent.futures.TimeoutError:
            reading.cancel()
            raise TimeoutError(f"the daemon's event loop did not answer within {_TIMEOUT_SECONDS:g} s") from None
