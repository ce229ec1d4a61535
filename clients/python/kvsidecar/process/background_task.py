"""A task that runs beside other work on the event loop, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self


class BackgroundTask:
    """A coroutine that runs from ``start`` to ``stop``, or while a ``with`` block runs.

    ``stop`` cancels the coroutine and waits for its end; ``stop`` is idempotent. If an error ends the coroutine, the
    loop's exception handler gets the error at once, and ``stop`` raises it.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the coroutine on the running event loop."""
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(_report_error)

    async def stop(self) -> None:
        """Cancel the coroutine and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _report_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_coro()!r} has failed and is not restarted", "exception": error, "task": task}
        )
