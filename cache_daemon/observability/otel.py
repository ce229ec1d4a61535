"""OpenTelemetry export over OTLP: metrics, and spans of calls and their slow parts.

Active only when an endpoint is set. A call is the child of the span that its client names (W3C Trace Context).
Attributes hold sizes and outcomes, never tokens, salts or hashes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from kvsidecar.cache.v1.cache_pb2 import StatsResponse
from kvsidecar.errors import Context
from kvsidecar.telemetry.otel_export import OtelProviders, otlp_providers

from cache_daemon.observability.metric_definitions import COUNTERS, GAUGES
from cache_daemon.observability.reuse_metrics import COUNTERS as COUNTERS_OF_REUSE
from cache_daemon.observability.reuse_metrics import MISSES
from cache_daemon.observability.spans import NOOP_SPAN, CallSpan, Span, WorkSpan, noop_work_span
from cache_daemon.observability.stats_snapshot import StatsSnapshots

SERVICE_NAME = "kvsidecar-cache"
_SERVICE = "kvsidecar.cache.v1.CacheService"
_PREFIX, _REUSE_PREFIX = "kvsidecar.cache.", "kvsidecar.engine."
_FRESH_SECONDS = 1.0


@dataclass(frozen=True)
class Telemetry:
    """Hooks that the daemon calls.

    ``observe`` starts the metrics once the daemon can take statistics snapshots.
    """

    call_span: CallSpan | None = None
    work_span: WorkSpan = noop_work_span
    observe: Callable[[StatsSnapshots], None] = lambda _: None


@asynccontextmanager
async def telemetry(endpoint: str) -> AsyncIterator[Telemetry]:
    """Export to an OTLP endpoint (gRPC) while the ``with`` block runs; do nothing without an endpoint.

    ``telemetry.otel_export.otlp_providers`` describes the choice of the endpoint. Raises
    ConfigurationError without the packages.
    """
    async with otlp_providers(SERVICE_NAME, endpoint) as providers:
        yield Telemetry() if providers is None else telemetry_for(providers)


def telemetry_for(providers: OtelProviders) -> Telemetry:
    """Return hooks that report to the SDK's providers."""
    spans, meter = _Spans(providers.traces.get_tracer("cache_daemon")), providers.meters.get_meter("cache_daemon")
    return Telemetry(spans.of_call, spans.of_work, lambda snapshots: _observe(meter, snapshots))


class _Spans:
    """Spans by OpenTelemetry's conventions for RPC."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._trace = tracer, trace
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def of_call(self, method: str, context: Context) -> Iterator[object]:
        """Open a span for an RPC; it ends with the outcome."""
        sent = {key: value for key, value in context.invocation_metadata() or () if key.startswith("trace")}
        with self._tracer.start_as_current_span(
            f"{_SERVICE}/{method}",
            context=self._propagator.extract(sent),
            kind=self._trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                # Only the error's name: its text may contain hashes or private data.
                span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
                span.set_status(self._trace.StatusCode.ERROR)
                raise

    def of_work(self, what: str) -> Span:
        """Open a span for a part of the current call; without a current call, do nothing."""
        if not self._trace.get_current_span().is_recording():
            return NOOP_SPAN
        # The span of the call already records the failure, without its text.
        found: Span = self._tracer.start_as_current_span(what, record_exception=False, set_status_on_exception=False)
        return found


def _observe(meter: Any, snapshots: StatsSnapshots) -> None:
    from opentelemetry.metrics import CallbackOptions, Observation

    latest = _CachedStats(snapshots)

    def reading(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(float(getattr(latest.stats(), name)))]

    def failing(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(int(bool(latest.stats().durable_failing)))]

    def remote_failing(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(int(bool(latest.stats().remote_failing)))]

    def calls(_: CallbackOptions) -> Iterable[Observation]:
        totals = snapshots.calls.totals
        return [Observation(n, {"rpc.method": m, "status": s}) for (m, s), n in list(totals.items())]

    def reuse(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        totals = snapshots.reuse.totals
        return lambda _: [Observation(getattr(n, name), of._asdict()) for of, n in list(totals.items())]

    def misses(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        totals = snapshots.reuse.totals
        return lambda _: [
            Observation(n, of._asdict() | {"kind": kind})
            for of, counts in list(totals.items())
            for kind, n in list(getattr(counts, name).items())
        ]

    for name, text in GAUGES.items():
        meter.create_observable_gauge(_PREFIX + name, [reading(name)], description=text)
    for name, text in COUNTERS_OF_REUSE.items():
        meter.create_observable_counter(_REUSE_PREFIX + name, [reuse(name)], description=text)
    for name, text in MISSES.items():
        meter.create_observable_counter(_REUSE_PREFIX + name, [misses(name)], description=text)
    for name, text in COUNTERS.items():
        meter.create_observable_counter(_PREFIX + name, [reading(name)], description=text)
    text = "1 while writes to the durable tier fail"
    meter.create_observable_gauge(_PREFIX + "durable_failing", [failing], description=text)
    text = "1 while the remote tier is disabled by failures"
    meter.create_observable_gauge(_PREFIX + "remote_failing", [remote_failing], description=text)
    meter.create_observable_counter(_PREFIX + "calls", [calls], description="Calls by method and outcome")


class _CachedStats:
    """One statistics snapshot for all metrics of a collection."""

    def __init__(self, snapshots: StatsSnapshots) -> None:
        self._snapshots = snapshots
        self._found: tuple[float, StatsResponse] | None = None

    def stats(self) -> StatsResponse:
        now = time.monotonic()
        if self._found is None or now - self._found[0] > _FRESH_SECONDS:
            self._found = now, self._snapshots.take()
        return self._found[1]
