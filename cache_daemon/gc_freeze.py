"""Periodic ``gc.freeze``: keeps garbage collection from stalling the event loop.

A full collection visits every object, which takes too long with 100,000 chunks. Freezing excludes the surviving objects
from later collections, which then visit only new objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

from kvsidecar.process.background_task import BackgroundTask

_INTERVAL_SECONDS = 10.0


@contextlib.asynccontextmanager
async def periodic_gc_freeze() -> AsyncIterator[None]:
    """Collect and freeze every 10 seconds while the ``with`` block runs."""
    gc.collect()
    gc.freeze()
    try:
        async with BackgroundTask(_freeze_periodically):
            yield
    finally:
        gc.unfreeze()


async def _freeze_periodically() -> None:
    while True:
        await asyncio.sleep(_INTERVAL_SECONDS)
        gc.collect()
        gc.freeze()
