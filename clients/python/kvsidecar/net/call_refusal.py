"""Refuses new calls of a gRPC server that is about to shut down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2

_HEALTH_PREFIX = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"
# If no call arrived for this time, probably no caller needs to learn of the shutdown.
_RECENT_SECONDS = 3.0
_TEXT = "this server is shutting down and takes no new calls; try again"


class CallRefusal(grpc.aio.ServerInterceptor):
    """Refuses new calls with UNAVAILABLE from ``refuse_for`` on, except health checks.

    gRPC's own shutdown ends calls that are just arriving with CANCELLED, which callers cannot tell from their own
    cancellation. A caller that gets UNAVAILABLE uses another server before that shutdown begins.
    """

    def __init__(self) -> None:
        self._refusing, self._called_at = False, float("-inf")

    async def refuse_for(self, seconds: float, at_once: asyncio.Event) -> None:
        """Refuse calls, and return after ``seconds`` or ``at_once``; return at once if no call arrived recently."""
        self._refusing = True
        if time.monotonic() - self._called_at < _RECENT_SECONDS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(at_once.wait(), seconds)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or str(handler_call_details.method).startswith(_HEALTH_PREFIX):
            return handler
        self._called_at = time.monotonic()
        if not self._refusing:
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return grpc.stream_unary_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAVAILABLE, _TEXT)
    raise AssertionError("abort returned")
