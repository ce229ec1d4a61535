"""Long work on the event loop, in pieces that nobody notices."""

from __future__ import annotations

import asyncio
import time

_SLICE_SECONDS = 0.004


class YieldTimer:
    """Call ``give_way`` now and then during long work: others have their turn when some milliseconds have passed."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def maybe_yield(self) -> None:
        if time.perf_counter() - self._since > _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
