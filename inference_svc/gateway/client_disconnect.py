"""Work for a client who may go: what nobody hears any more is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

_POLL_SECONDS = 0.25
T = TypeVar("T")


class ClientDisconnected(Exception):
    """Nobody is there to answer."""


async def _nothing(_: object) -> None:
    """What needs no closing."""


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, T], close: Callable[[T], Awaitable[None]] = _nothing
) -> T:
    """What comes of ``work``, or ClientGone: it is cancelled as soon as the client has gone. Starlette tells a handler
    nothing of that by itself. What came of it in the very moment in which nobody wanted it any more is closed."""
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
