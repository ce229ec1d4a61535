"""Call metrics: durations and outcomes of RPCs by method.

One instance per daemon; used on the event loop. ``CallMetrics.failing`` decides the health of the whole daemon.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

import grpc
from kvsidecar.cache.v1.cache_pb2 import CallInfo
from kvsidecar.errors import KVSidecarError, LimitExceeded, QuotaExceeded

from cache_daemon.observability.spans import CallSpan

_WINDOW_SECONDS = 60.0
_MAX_SAMPLES = 2048
# The daemon counts as failing if at least this number, and at least this share, of a method's calls in a minute end
# INTERNAL.
_MIN_INTERNAL, _INTERNAL_SHARE = 10, 0.5
_INTERNAL = grpc.StatusCode.INTERNAL.name


class CallMetrics:
    """Durations and failures by method: totals since start, samples of the last minute."""

    def __init__(self, span: CallSpan | None = None) -> None:
        """Create empty metrics; ``span`` surrounds each unary call."""
        self.span = span
        self.totals: Counter[tuple[str, str]] = Counter()  # (method, status name) -> calls
        self.seconds: Counter[str] = Counter()  # method -> sum of durations
        self.refused = 0
        self._recent: dict[str, deque[tuple[float, float, bool]]] = {}
        self._minute = FailureWindow()

    def note(self, method: str, seconds: float, error: BaseException | None) -> None:
        """Record a finished call with its duration in seconds."""
        self.count(method, error)
        self.seconds[method] += seconds  # type: ignore[assignment]
        self._recent.setdefault(method, deque(maxlen=_MAX_SAMPLES)).append(
            (time.monotonic(), seconds, error is not None)
        )

    def count(self, method: str, error: BaseException | None) -> None:
        """Record a finished call without a meaningful duration, such as a stream."""
        status = _status_of(error)
        self.totals[method, status] += 1
        self.refused += isinstance(error, (LimitExceeded, QuotaExceeded))
        self._minute.note(method, internal=status == _INTERNAL)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic seconds) of a failure of the daemon, or None."""
        return self._minute.failing

    def recent(self) -> list[CallInfo]:
        """Return the statistics of the last minute, slowest method first."""
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
    """Counts calls and internal failures of the last minute, by second."""

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
        """Return a sentence about the failing method, and the start of the failure; None if no method fails.

        A method fails if at least half of its calls in the last minute (and at least 10) ended INTERNAL.
        """
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


def is_internal(error: BaseException | None) -> bool:
    """Return True if an error is a defect of the daemon.

    gRPC raises its own ``InternalError`` when a handler writes to a call that the client has just cancelled.
    """
    expected = (KVSidecarError, grpc.aio.AbortError, grpc.aio.InternalError)
    return isinstance(error, Exception) and not isinstance(error, expected)


def _status_of(error: BaseException | None) -> str:
    """Return the status name under which a call is counted."""
    if error is None:
        return "OK"
    if is_internal(error):
        return _INTERNAL
    if isinstance(error, (grpc.aio.InternalError, asyncio.CancelledError)):
        return "CANCELLED"
    return str(getattr(error, "reason", type(error).__name__.upper()))
