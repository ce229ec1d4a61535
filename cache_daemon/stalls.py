"""How long the event loop was kept from its work: what every caller waits for at worst."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

_STEP_SECONDS = 0.02
_WINDOW_SECONDS = 60.0


class StallWatch:
    """Watches the running loop while its block lasts."""

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=4096)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StallWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def worst_ms(self) -> float:
        """The longest stall of the last minute, in milliseconds."""
        since = time.monotonic() - _WINDOW_SECONDS
        return max((ms for at, ms in self._stalls if at >= since), default=0.0)

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_STEP_SECONDS)
            late_ms = (time.monotonic() - began - _STEP_SECONDS) * 1e3
            if late_ms > 1.0:
                self._stalls.append((began, late_ms))
