"""Exports spans and metrics over OTLP (gRPC).

Active only if an endpoint is set; otherwise OpenTelemetry's packages are not loaded.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from kvsidecar.errors import Cancelled, ConfigurationError
from kvsidecar.telemetry.tracer import Attributes, Metadata, Span, Tracer, error_name

ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_SHUTDOWN_SECONDS = 3.0


@dataclass(frozen=True)
class OtelProviders:
    """Tracer and meter providers of OpenTelemetry's SDK."""

    traces: Any
    meters: Any

    def tracer(self, name: str) -> Tracer:
        """Return the tracer of a package."""
        return _OtelTracer(self.traces.get_tracer(name))


def validate_endpoint(value: str) -> str:
    """Validate an endpoint setting. Raises ValueError for an invalid URL."""
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("it must begin with http:// (plain) or https:// (TLS)")
    return value


def is_enabled(endpoint: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an endpoint is configured. ``OTEL_SDK_DISABLED=true`` overrides it."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return bool(endpoint) or any(environment.get(name) for name in ENDPOINT_VARIABLES)


@asynccontextmanager
async def otlp_providers(service: str, endpoint: str) -> AsyncIterator[OtelProviders | None]:
    """Export to an OTLP endpoint (gRPC) while the ``with`` block runs.

    The endpoint is ``endpoint`` or, if that is empty, the endpoint of the standard variables
    ``OTEL_EXPORTER_OTLP_...``. Yields None without an endpoint. Raises ConfigurationError when OpenTelemetry is not
    installed.
    """
    if not is_enabled(endpoint):
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            "an OTLP endpoint is set, but OpenTelemetry is not installed; pip install 'kvsidecar[otel]'"
        ) from error
    at = {"endpoint": endpoint} if endpoint else {}
    processor = BatchSpanProcessor(OTLPSpanExporter(**at))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(**at))
    async with sdk_providers(service, processor, reader) as found:
        yield found


@asynccontextmanager
async def sdk_providers(service: str, processor: Any, reader: Any) -> AsyncIterator[OtelProviders]:
    """Yield providers over an SDK span processor and a metric reader; shut both down."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    # The standard variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    resource = Resource({"service.name": service}).merge(Resource.create())
    if resource.attributes.get("service.name", "").startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": service}))
    traces = TracerProvider(resource=resource, shutdown_on_exit=False)
    traces.add_span_processor(processor)
    meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
    try:
        yield OtelProviders(traces, meters)
    finally:
        # On threads: reading the last metrics may need this event loop.
        await asyncio.to_thread(_shut_down, traces, meters)


def _shut_down(*providers: Any) -> None:
    """Flush for a limited time only: an absent collector must not delay the exit."""
    threads = [threading.Thread(target=provider.shutdown, daemon=True) for provider in providers]
    deadline = time.monotonic() + _SHUTDOWN_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class _OtelTracer(Tracer):
    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def serve(self, name: str, sent: Iterable[tuple[str, str | bytes]], attributes: Attributes) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: value for key, value in sent if key in ("traceparent", "tracestate")}
        # Child spans use the monotonic clock; this offset converts it to wall-clock time.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        began = time.perf_counter()
        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=offset_ns + int(began * 1e9),
        )
        return _OtelSpan(self._tracer, span, offset_ns, began)


class _OtelSpan(Span):
    """A span of OpenTelemetry's SDK."""

    def __init__(self, tracer: Any, span: Any, offset_ns: int, began: float) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._span, self._offset_ns, self.began = tracer, span, offset_ns, began
        self._within = set_span_in_context(span)

    def call(self, name: str) -> Span:
        from opentelemetry.trace import SpanKind

        began = time.perf_counter()
        span = self._tracer.start_span(name, self._within, SpanKind.CLIENT, start_time=self._ns(began))
        return _OtelSpan(self._tracer, span, self._offset_ns, began)

    def metadata(self) -> Metadata:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(named, self._within)
        return tuple(named.items())

    def phase(self, name: str, began: float, ended: float) -> None:
        self._tracer.start_span(name, self._within, start_time=self._ns(began)).end(self._ns(ended))

    @contextmanager
    def part(self, name: str, began: float) -> Iterator[object]:
        from opentelemetry.trace import use_span

        span = self._tracer.start_span(name, self._within, start_time=self._ns(began))
        quietly = use_span(span, record_exception=False, set_status_on_exception=False)
        with _OtelSpan(self._tracer, span, self._offset_ns, began) as found, quietly:
            yield found

    def event(self, name: str) -> None:
        self._span.add_event(name, timestamp=self._ns(time.perf_counter()))

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        from opentelemetry.trace import StatusCode

        name = error_name(error)
        self._span.set_attribute("error.type", name)
        if name != Cancelled.reason:  # a cancellation by the caller is no failure
            self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        self._span.end(self._ns(time.perf_counter()))

    def _ns(self, seconds: float) -> int:
        return self._offset_ns + int(seconds * 1e9)
