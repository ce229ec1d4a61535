"""Auth interceptor: authenticates every call of a shared listener, with timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import grpc
from kvsidecar.errors import (
    CACHE_DOMAIN,
    Context,
    DeadlineExceeded,
    InvalidRequest,
    KVSidecarError,
    LimitExceeded,
    Unauthenticated,
    abort,
)

from cache_daemon.auth.authenticator import PrincipalResolver, RefusalLog
from cache_daemon.auth.principal import Principal

UNAUTHENTICATED_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Methods that need no authentication: they answer only SERVING or NOT_SERVING, and probes carry no tokens."""
MAX_UNAUTHENTICATED_BYTES = 4 << 10
"""Maximal request size of an unauthenticated method."""

# Service whose calls stream requests; the cache service counts its own streams.
_REFLECTION = "/grpc.reflection."
_END: Any = object()
_UNNAMED = Principal("unnamed")


@dataclass(frozen=True)
class InterceptorTimeouts:
    """Timeouts and limits for slow clients, in seconds."""

    call_seconds: float = 60.0
    """Limit of a whole unary call."""
    stall_seconds: float = 60.0
    """Limit for the client to send the next message of a stream, or to accept one. It must exceed three heartbeats."""
    request_seconds: float = 10.0
    """Limit for the request message of a unary call to arrive, once the interceptor awaits it."""
    overload_seconds: float = 0.05
    """Replaces ``request_seconds`` while ``max_pending`` other requests of the same caller are still arriving."""
    max_pending: int = 16
    """Maximal number of requests of one caller that may be arriving at once. Each may occupy memory for a whole
    message."""
    max_reflections: int = 32
    """Maximal number of open reflection calls of one caller."""


class _PendingRequests:
    """Requests of one caller that are still arriving, and its open reflection calls.

    gRPC allocates memory for a request only while the interceptor awaits it, so a limit on the number of awaited
    requests bounds the memory.
    """

    def __init__(self, timeouts: InterceptorTimeouts) -> None:
        self._timeouts, self._num_pending, self._num_reflections = timeouts, 0, 0

    def count_reflection(self, context: Context) -> None:
        """Count a reflection call until it ends. Raises LimitExceeded."""
        if self._num_reflections >= self._timeouts.max_reflections:
            raise LimitExceeded(
                f"there are {self._num_reflections} open reflection calls of this caller already, the most that are "
                "allowed; end one and try again"
            )
        self._num_reflections += 1
        context.add_done_callback(self._end_reflection)  # type: ignore[arg-type]

    def _end_reflection(self, _: object) -> None:
        self._num_reflections -= 1

    async def next(self, messages: AsyncIterator[Any]) -> Any:
        """Return the first message, or ``_END``.

        Raises DeadlineExceeded, or LimitExceeded when too many requests are arriving.
        """
        crowded = self._num_pending >= self._timeouts.max_pending
        seconds = self._timeouts.overload_seconds if crowded else self._timeouts.request_seconds
        self._num_pending += not crowded
        try:
            async with asyncio.timeout(seconds) as limit:
                return await anext(aiter(messages), _END)
        except TimeoutError:
            if not limit.expired():
                raise
            if crowded:
                raise LimitExceeded(
                    f"{self._timeouts.max_pending} requests of this caller are arriving slowly already, the most that "
                    "are allowed; wait for an answer and try again"
                ) from None
            raise DeadlineExceeded(f"the request did not arrive within {seconds:g} s") from None
        finally:
            self._num_pending -= not crowded


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates every method of a server except ``UNAUTHENTICATED_METHODS``.

    This includes health and reflection. All methods are registered as request-streaming, because gRPC then receives no
    message before the caller is authenticated.
    """

    def __init__(self, principal_of: PrincipalResolver, timeouts: InterceptorTimeouts = InterceptorTimeouts()) -> None:
        self._principal_of, self._timeouts = principal_of, timeouts
        self._refusals = RefusalLog()
        self._pending: WeakValueDictionary[Principal, _PendingRequests] = WeakValueDictionary()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return handler
        guarded = _AuthenticatedMethod(
            handler, method, self._principal_of, self._timeouts, self._refusals, self._pending
        )
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                guarded.stream, handler.request_deserializer, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            guarded.single, handler.request_deserializer, handler.response_serializer
        )


class _AuthenticatedMethod:
    """One RPC method behind the interceptor."""

    def __init__(
        self,
        handler: grpc.RpcMethodHandler[Any, Any],
        method: str,
        principal_of: PrincipalResolver,
        timeouts: InterceptorTimeouts,
        refusals: RefusalLog,
        max_pending: WeakValueDictionary[Principal, _PendingRequests],
    ) -> None:
        self._many = handler.request_streaming
        self._behaviour: Any = (
            (handler.stream_stream if self._many else handler.unary_stream)
            if handler.response_streaming
            else (handler.stream_unary if self._many else handler.unary_unary)
        )
        self._method, self._principal_of, self._timeouts, self._refusals = method, principal_of, timeouts, refusals
        self._pending = max_pending

    async def single(self, messages: AsyncIterator[Any], context: Context) -> Any:
        seconds = None if self._many else self._timeouts.call_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._behaviour(await self._admit(messages, context), context)
        except TimeoutError:
            if not limit.expired():
                raise
            await abort(context, DeadlineExceeded(f"the call took longer than {seconds:g} s"), CACHE_DOMAIN)
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)

    async def stream(self, messages: AsyncIterator[Any], context: Context) -> None:
        try:
            answers = self._behaviour(await self._admit(messages, context), context)
            if hasattr(answers, "__aiter__"):
                async with aclosing(answers):  # releases the method's resources now, not at garbage collection
                    async for answer in answers:
                        await self._write(context, answer)
            else:
                await answers
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)

    async def _admit(self, messages: AsyncIterator[Any], context: Context) -> Any:
        caller = _UNNAMED if self._method in UNAUTHENTICATED_METHODS else self._authenticate(context)
        max_pending = self._pending.get(caller)
        if max_pending is None:
            max_pending = self._pending[caller] = _PendingRequests(self._timeouts)
        if self._many:
            if self._method.startswith(_REFLECTION):
                max_pending.count_reflection(context)
            return _with_timeout(messages, self._timeouts.stall_seconds)
        request = await max_pending.next(messages)
        if request is _END:
            raise InvalidRequest("the call has no message; send one")
        if caller is _UNNAMED and (size := request.ByteSize()) > MAX_UNAUTHENTICATED_BYTES:
            raise InvalidRequest(f"the request has {size} bytes; at most {MAX_UNAUTHENTICATED_BYTES} are allowed")
        return request

    def _authenticate(self, context: Context) -> Principal:
        try:
            return self._principal_of(context)
        except Unauthenticated as error:
            self._refusals.note(context.peer(), self._method, error)
            raise

    async def _write(self, context: Context, answer: Any) -> None:
        seconds = self._timeouts.stall_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                await context.write(answer)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"the client took nothing for {seconds:g} s") from None


async def _with_timeout(messages: AsyncIterator[Any], seconds: float) -> AsyncIterator[Any]:
    source = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(seconds):
                message = await anext(source, _END)
        except TimeoutError:
            raise DeadlineExceeded(f"the client sent nothing for {seconds:g} s") from None
        if message is _END:
            return
        yield message
