"""Waits for a condition, for benchmarks and tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_POLL_SECONDS = 0.01


def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait until a condition is true. Returns the duration of the wait in seconds; raises TimeoutError."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"the condition was not true within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


async def until_async(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Like ``until``, while the event loop runs."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"the condition was not true within {seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    return time.monotonic() - began
