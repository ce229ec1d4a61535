"""Cancels a request's work when its HTTP client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

_POLL_SECONDS = 0.25
T = TypeVar("T")


class ClientDisconnected(Exception):
    """The HTTP client closed its connection."""


async def _nothing(_: object) -> None:
    """Do nothing: most results need no close."""


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, T], close: Callable[[T], Awaitable[None]] = _nothing
) -> T:
    """Return the result of ``work``, or cancel it when the client disconnects.

    Polls for the disconnect, because Starlette does not notify handlers of it. ``close`` closes a result that arrives
    at the moment of the disconnect. Raises ClientDisconnected.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise ClientDisconnected
    except BaseException:
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:
            await close(task.result())
        raise
    return task.result()
