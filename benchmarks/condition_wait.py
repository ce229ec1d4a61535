"""Waits until a condition is true, for benchmarks and tests. Both functions raise TimeoutError."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.01


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true."""
    for _ in _while_false(condition, seconds):
        time.sleep(_POLL_SECONDS)


async def until_async(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true, while the event loop runs."""
    for _ in _while_false(condition, seconds):
        await asyncio.sleep(_POLL_SECONDS)


def _while_false(condition: Callable[[], object], seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition was not true within {seconds:g} s")
        yield
