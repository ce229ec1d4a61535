"""Threads of the store: copies, and reads of the durable tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

_COPY_THREADS, _READ_THREADS = 2, 4

T = TypeVar("T")


class StoreThreads:
    """Threads for copies and for reads of the durable tier.

    ``span(name)`` surrounds each piece of work with a trace span.
    """

    def __init__(self, span: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()) -> None:
        self.span = span
        self.copying = ThreadPoolExecutor(_COPY_THREADS, "copy")
        self.reading = ThreadPoolExecutor(_READ_THREADS, "durable-read")

    async def copy(self, work: Callable[[], T]) -> T:
        """Run a copy between staging and arena."""
        with self.span("copy"):
            return await asyncio.get_running_loop().run_in_executor(self.copying, work)

    async def read(self, work: Callable[[], T]) -> T:
        """Run a read of the durable tier."""
        with self.span("durable read"):
            return await asyncio.get_running_loop().run_in_executor(self.reading, work)
