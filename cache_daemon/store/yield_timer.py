"""Cooperative yielding of long work on the event loop."""

from __future__ import annotations

import asyncio
import time

_SLICE_SECONDS = 0.004


class YieldTimer:
    """Yields to the event loop every few milliseconds of work, at calls of ``maybe_yield``."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def maybe_yield(self) -> None:
        """Yield if the current slice of time is used up."""
        if time.perf_counter() - self._since > _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
