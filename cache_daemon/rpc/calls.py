"""What all methods have in common: errors become status, and every call is measured."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from kvsidecar.cache.v1.cache_pb2 import CallInfo
from kvsidecar.errors import CACHE_DOMAIN, Context, KVSidecarError, LimitExceeded, QuotaExceeded, abort

from cache_daemon.observe.spans import CallSpan
from cache_daemon.rpc.decoding import decoded

log = structlog.get_logger("cache_daemon")

_WINDOW_SECONDS = 60.0
_MOST_SAMPLES = 2048

S = TypeVar("S", bound="Measured")
Q = TypeVar("Q")
R = TypeVar("R")


class Calls:
    """Durations and failures by method: totals since the start, and samples of the last minute."""

    def __init__(self, span: CallSpan | None = None) -> None:
        """``span`` surrounds each call of methods with one answer."""
        self.span = span
        self.totals: Counter[tuple[str, str]] = Counter()  # (method, status name) -> calls
        self.seconds: Counter[str] = Counter()  # method -> sum of durations
        self.refused = 0
        self._recent: dict[str, deque[tuple[float, float, bool]]] = {}

    def note(self, method: str, seconds: float, error: BaseException | None) -> None:
        status = "OK" if error is None else getattr(error, "reason", type(error).__name__.upper())
        self.totals[method, status] += 1
        self.seconds[method] += seconds  # type: ignore[assignment]
        self.refused += isinstance(error, (LimitExceeded, QuotaExceeded))
        self._recent.setdefault(method, deque(maxlen=_MOST_SAMPLES)).append(
            (time.monotonic(), seconds, error is not None)
        )

    def recent(self) -> list[CallInfo]:
        """The last minute, slowest method first."""
        since = time.monotonic() - _WINDOW_SECONDS
        out = []
        for method, samples in self._recent.items():
            while samples and samples[0][0] < since:
                samples.popleft()
            if samples:
                times = sorted(seconds * 1e3 for _, seconds, _ in samples)
                out.append(
                    CallInfo(
                        method=method,
                        count=len(times),
                        errors=sum(failed for _, _, failed in samples),
                        p50_ms=times[len(times) // 2],
                        p99_ms=times[min(len(times) - 1, len(times) * 99 // 100)],
                        max_ms=times[-1],
                    )
                )
        return sorted(out, key=lambda c: -c.p99_ms)


class Measured(Protocol):
    """A servicer whose calls are counted."""

    calls: Calls


def unary(method: Callable[[S, Q, Context], Awaitable[R]]) -> Callable[[S, Q, Context], Awaitable[R]]:
    """Decorates methods with one answer."""

    @wraps(method)
    async def call(service: S, request: Q, context: Context) -> R:
        began, error = time.perf_counter(), None
        try:
            if service.calls.span is None:
                return await method(service, decoded(request), context)
            with service.calls.span(method.__name__, context):
                return await method(service, decoded(request), context)
        except BaseException as caught:
            error = caught
            await _end(method.__name__, caught, context)
            raise
        finally:
            service.calls.note(method.__name__, time.perf_counter() - began, error)

    return call


def streaming(method: Callable[[S, Q, Context], AsyncIterator[R]]) -> Callable[[S, Q, Context], AsyncIterator[R]]:
    """Decorates methods with a stream of answers; what they hold is given back when the caller goes away."""

    @wraps(method)
    async def call(service: S, request: Q, context: Context) -> AsyncIterator[R]:
        began, error = time.perf_counter(), None
        try:
            async with aclosing(method(service, decoded(request), context)) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    yield answer
        except GeneratorExit:
            raise
        except BaseException as caught:
            error = caught
            await _end(method.__name__, caught, context)
            raise
        finally:
            service.calls.note(method.__name__, time.perf_counter() - began, error)

    return call


async def _end(name: str, error: BaseException, context: Context) -> None:
    """Ends a call that failed. Errors of ours say what happened; of all others only the log does."""
    if isinstance(error, KVSidecarError):
        await abort(context, error, CACHE_DOMAIN)
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
        log.exception("a call failed", method=name)
        await context.abort(grpc.StatusCode.INTERNAL, f"{name} failed inside the daemon; its log says why")


def cancelled_later(context: Context, undo: Callable[[], Any]) -> None:
    """Calls ``undo`` if the caller went away before the answer reached it: nobody else knows what it got."""

    def done(_: object) -> None:
        if context.cancelled():
            undo()

    context.add_done_callback(done)  # type: ignore[arg-type]
