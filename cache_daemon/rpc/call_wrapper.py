"""What all methods have in common: errors become status, and every call is measured."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from kvsidecar.cache.v1.cache_pb2 import CallInfo
from kvsidecar.errors import CACHE_DOMAIN, Context, KVSidecarError, LimitExceeded, QuotaExceeded, abort

from cache_daemon.observability.spans import CallSpan
from cache_daemon.rpc.request_decoder import EncodedRequest, decode_request

log = structlog.get_logger("cache_daemon")

_WINDOW_SECONDS = 60.0
_MAX_SAMPLES = 2048
# So many calls of a minute, and such a share of them, must fail inside the daemon for it to be at fault.
_MIN_INTERNAL, _INTERNAL_SHARE = 10, 0.5
_INTERNAL = grpc.StatusCode.INTERNAL.name

S = TypeVar("S", bound="Measured")
Q = TypeVar("Q")
R = TypeVar("R")


class CallMetrics:
    """Durations and failures by method: totals since the start, and samples of the last minute."""

    def __init__(self, span: CallSpan | None = None) -> None:
        """``span`` surrounds each call of methods with one answer."""
        self.span = span
        self.totals: Counter[tuple[str, str]] = Counter()  # (method, status name) -> calls
        self.seconds: Counter[str] = Counter()  # method -> sum of durations
        self.refused = 0
        self._recent: dict[str, deque[tuple[float, float, bool]]] = {}
        self._minute = FailureWindow()

    def note(self, method: str, seconds: float, error: BaseException | None) -> None:
        """A call has ended after so many seconds."""
        self.count(method, error)
        self.seconds[method] += seconds  # type: ignore[assignment]
        self._recent.setdefault(method, deque(maxlen=_MAX_SAMPLES)).append(
            (time.monotonic(), seconds, error is not None)
        )

    def count(self, method: str, error: BaseException | None) -> None:
        """A call has ended, and how long it took says nothing."""
        status = _status_of(error)
        self.totals[method, status] += 1
        self.refused += isinstance(error, (LimitExceeded, QuotaExceeded))
        self._minute.note(method, internal=status == _INTERNAL)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Why the daemon as a whole is at fault, and since when (monotonic seconds); None while it works."""
        return self._minute.failing

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


class FailureWindow:
    """Calls of the last minute by second: how many there were, and how many failed inside the daemon."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counter[str], Counter[str]]] = deque()
        self._since: float | None = None

    def note(self, method: str, *, internal: bool) -> None:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter(), Counter()))
        _, calls, failed = self._seconds[-1]
        calls[method] += 1
        failed[method] += internal

    @property
    def failing(self) -> tuple[str, float] | None:
        """The method half of whose calls failed, and since when; None when there is none, or few calls failed."""
        oldest = self._clock() - _WINDOW_SECONDS
        while self._seconds and self._seconds[0][0] < oldest:
            self._seconds.popleft()
        calls, failed = Counter[str](), Counter[str]()
        for _, some, some_failed in self._seconds:
            calls += some
            failed += some_failed
        worst = max(
            (m for m, n in failed.items() if n >= _INTERNAL_SHARE * calls[m]), key=failed.__getitem__, default=""
        )
        if failed[worst] < _MIN_INTERNAL:
            self._since = None
            return None
        if self._since is None:
            self._since = self._clock()
        return f"{failed[worst]} of {calls[worst]} calls of {worst} in the last minute ended INTERNAL", self._since


class Measured(Protocol):
    """A servicer whose calls are counted."""

    calls: CallMetrics

    def large(self, context: Context, size_bytes: int) -> AbstractContextManager[None]: ...


def unary(method: Callable[[S, Q, Context], Awaitable[R]]) -> Callable[[S, Q, Context], Awaitable[R]]:
    """Decorates methods with one answer."""

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
    """Decorates methods with a stream of answers; what they hold is given back when the caller goes away."""

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


def _counted(service: Measured, request: object, context: Context) -> AbstractContextManager[None]:
    """Counts a large request against its caller's budget."""
    return service.large(context, request.size_bytes) if isinstance(request, EncodedRequest) else nullcontext()


def _status_of(error: BaseException | None) -> str:
    """How a call that ended so is counted."""
    if error is None:
        return "OK"
    if isinstance(error, Exception) and not isinstance(error, (KVSidecarError, grpc.aio.AbortError)):
        return _INTERNAL
    return str(getattr(error, "reason", type(error).__name__.upper()))


async def abort_call(name: str, error: BaseException, context: Context) -> None:
    """Ends a call that failed. Errors of ours say what happened; of all others only the log does."""
    if isinstance(error, KVSidecarError):
        await abort(context, error, CACHE_DOMAIN)
    if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
        log.exception("a call failed", method=name)
        await context.abort(grpc.StatusCode.INTERNAL, f"{name} failed inside the daemon; its log says why")


def undo_if_cancelled(context: Context, undo: Callable[[], Any]) -> None:
    """Calls ``undo`` if the caller went away before the answer reached it: nobody else knows what it got."""

    def done(_: object) -> None:
        if context.cancelled():
            undo()

    context.add_done_callback(done)  # type: ignore[arg-type]
