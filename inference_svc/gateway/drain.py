"""Graceful shutdown: readiness fails, then running requests finish or are cut off with an error."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse
from kvsidecar.errors import Unavailable
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_svc.gateway.anthropic_api.error_envelope import error_event_for, error_response_for
from inference_svc.gateway.fleet_api import SERVING_PATH
from inference_svc.gateway.health_routes import HEALTH, HEALTH_PATHS, PING, READYZ
from inference_svc.gateway.request_log import log_line

_READINESS = frozenset({READYZ, HEALTH, PING, SERVING_PATH})
# A draining process does not wait for these requests.
_PROBES = _READINESS | HEALTH_PATHS | {"/metrics"}


class Drain:
    """State of a shutdown, and the requests that it waits for. Runs on the event loop."""

    def __init__(self, seconds: float) -> None:
        """Create the state; after the shutdown begins, running requests have ``seconds`` to finish."""
        self.seconds = seconds
        self.has_begun = False
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Record the task of a running request."""
        self._running.add(task)
        self._idle.clear()

    def leave(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle.set()

    def cut(self) -> None:
        """Cancel the requests that still run; ``DrainMiddleware`` ends their answers with an error."""
        self.has_begun, self.seconds = True, 0.0
        for task in self._running:
            task.cancel()

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no request runs, for at most ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running:  # a new request may have begun since the event was set
                    await self._idle.wait()


class DrainMiddleware:
    """Counts running requests, fails readiness during a shutdown, and ends cut-off answers with an error.

    Plain ASGI middleware. It is inside ``RequestGuard``, so that the guard counts the cut-off streams as aborted.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] in _PROBES:
            app = self._app
            if self._drain.has_begun and scope["path"] in _READINESS:
                app = JSONResponse({"status": "draining", "running": self._drain.num_running}, 503)
            await app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        started = ended = False

        async def watched(message: Message) -> None:
            nonlocal started, ended
            started = started or message["type"] == "http.response.start"
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        self._drain.enter(task)
        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._drain.has_begun or ended:
                raise
            task.uncancel()
            await _end_with_error(scope, receive, send, started)
        finally:
            self._drain.leave(task)


async def _end_with_error(scope: Scope, receive: Receive, send: Send, started: bool) -> None:
    error = Unavailable("the server shuts down and cannot finish this answer; send the request again")
    if not started:
        log_line().add(error=error.reason)
        await error_response_for(scope, error)(scope, receive, send)
        return
    log_line().abort(error.reason)
    # The stream may stop in the middle of an event: the blank line ends that event.
    await send({"type": "http.response.body", "body": b"\n\n" + error_event_for(scope, error), "more_body": False})
