"""Keeps Python's cycle collector from stopping the event loop.

A full collection looks at every object; with 100,000 chunks that takes longer than anybody should wait. So what has
lived for a while is taken out of its sight (``gc.freeze``): then a collection looks at what is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

_EVERY_SECONDS = 10.0


@contextlib.asynccontextmanager
async def short_collections() -> AsyncIterator[None]:
    """Collects often and little while the block lasts."""
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(_keep_short())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        gc.unfreeze()


async def _keep_short() -> None:
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        gc.collect()
        gc.freeze()
