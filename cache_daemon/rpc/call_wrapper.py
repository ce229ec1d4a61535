"""Decorators of RPC methods: map errors to status codes and record call metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import wraps
from typing import Any, TypeVar

import grpc
import structlog
from kvsidecar.errors import CACHE_DOMAIN, Context, KVSidecarError, abort

from cache_daemon.observability.call_metrics import is_internal
from cache_daemon.rpc.request_decoder import EncodedRequest, decode_request
from cache_daemon.rpc.servicer_base import ServicerBase

log = structlog.get_logger("cache_daemon")

S = TypeVar("S", bound=ServicerBase)
Q = TypeVar("Q")
R = TypeVar("R")


def unary(method: Callable[[S, Q, Context], Awaitable[R]]) -> Callable[[S, Q, Context], Awaitable[R]]:
    """Decorate a method with a single response."""

    @wraps(method)
    async def call(service: S, request: Q, context: Context) -> R:
        began, error = time.perf_counter(), None
        try:
            with _counted(service, request, context):
                if service.calls.span is None:
                    return await method(service, await decode_request(request), context)
                with service.calls.span(method.__name__, context):
                    return await method(service, await decode_request(request), context)
        except BaseException as caught:
            error = caught
            await abort_call(method.__name__, caught, context)
            raise
        finally:
            service.calls.note(method.__name__, time.perf_counter() - began, error)

    return call


def streaming(method: Callable[[S, Q, Context], AsyncIterator[R]]) -> Callable[[S, Q, Context], AsyncIterator[R]]:
    """Decorate a method with streamed responses.

    Releases the method's resources when the client disconnects.
    """

    @wraps(method)
    async def call(service: S, request: Q, context: Context) -> AsyncIterator[R]:
        began, error = time.perf_counter(), None
        try:
            with _counted(service, request, context):
                async with aclosing(method(service, await decode_request(request), context)) as answers:  # type: ignore[type-var]
                    async for answer in answers:
                        yield answer
        except GeneratorExit:
            raise
        except BaseException as caught:
            error = caught
            await abort_call(method.__name__, caught, context)
            raise
        finally:
            service.calls.note(method.__name__, time.perf_counter() - began, error)

    return call


def _counted(service: ServicerBase, request: object, context: Context) -> AbstractContextManager[None]:
    """Count a large request against its caller's budget."""
    return service.large(context, request.size_bytes) if isinstance(request, EncodedRequest) else nullcontext()


async def abort_call(name: str, error: BaseException, context: Context) -> None:
    """Abort a failed call.

    KVSidecar errors reach the client with their message; the cause of any other error is only logged.
    """
    if isinstance(error, KVSidecarError):
        await abort(context, error, CACHE_DOMAIN)
    if is_internal(error):
        log.exception("a call failed", method=name)
        await context.abort(grpc.StatusCode.INTERNAL, f"{name} failed inside the daemon; its log says why")


def undo_if_cancelled(context: Context, undo: Callable[[], Any]) -> None:
    """Call ``undo`` if the client disconnects before it gets the response.

    A client without the response does not know the ids that it must release.
    """

    def done(_: object) -> None:
        if context.cancelled():
            undo()

    context.add_done_callback(done)  # type: ignore[arg-type]
