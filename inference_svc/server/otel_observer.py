"""OpenTelemetry observer: spans and metrics of a worker's requests.

Names are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ (``gen_ai.server.*``); attributes
that are missing there have vLLM's names (``gen_ai.latency.*``). No text, token, salt or id is exported.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import grpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.telemetry.otel_export import OtelProviders
from kvsidecar.telemetry.tracer import NOOP_SPAN, Span, error_name

from inference_svc.sequence.sequence import Sequence

SERVICE_NAME = "kvsidecar-worker"
SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_PROVIDER = "kvsidecar"
# Bucket boundaries that OpenTelemetry's conventions recommend, in seconds.
_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
Context = grpc.aio.ServicerContext[Any, Any]


class ObservedRequest:
    """Context of one served request; this base class exports nothing."""

    span: Span = NOOP_SPAN

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the observation; ``error`` is the error of a failed request."""

    def answered(self, sequence: Sequence) -> None:
        """Record a complete answer."""


NOOP_REQUEST = ObservedRequest()


class RequestObserver:
    """Observer of requests; this base class does nothing."""

    def request(
        self, method: str, context: Context | None, prompt: pb.Prompt | None = None, service: str = SERVICE
    ) -> ObservedRequest:
        """Observe a call of ``method``; calls that generate pass their ``prompt``."""
        return NOOP_REQUEST


NOOP = RequestObserver()


class OtelObserver(RequestObserver):
    """Exports requests as OpenTelemetry spans and histograms."""

    def __init__(self, providers: OtelProviders, model: str) -> None:
        self._tracer, self.model = providers.tracer("inference_svc"), model
        meter = providers.meters.get_meter("inference_svc")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=buckets
            )

        self.duration = histogram("request.duration", "Time from arrival to the end of a request", _DURATION_BUCKETS)
        self.ttft = histogram("time_to_first_token", "From a request's arrival to its first token", _TTFT_BUCKETS)
        self.time_per_token = histogram(
            "time_per_output_token", "Of a request, between tokens after the first", _ITL_BUCKETS
        )

    def request(
        self, method: str, context: Context | None, prompt: pb.Prompt | None = None, service: str = SERVICE
    ) -> ObservedRequest:
        sent = (context.invocation_metadata() or ()) if context is not None else ()
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        span = self._tracer.serve(f"{service}/{method}", sent, attributes)
        kind = None if prompt is None else "chat" if prompt.WhichOneof("kind") == "chat" else "text_completion"
        return _OtelRequest(self, span, kind)


class _OtelRequest(ObservedRequest):
    def __init__(self, telling: OtelObserver, span: Span, operation: str | None) -> None:
        self.span, self._observer, self._operation = span, telling, operation
        self._began = time.perf_counter()
        self._attributes = {
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.response.model": telling.model,
            **({"gen_ai.operation.name": operation} if operation else {}),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.span.note(self._attributes)
        self.span.__exit__(kind, error, traceback)
        if self._operation:
            failed = {"error.type": error_name(error)} if error is not None else {}
            self._observer.duration.record(time.perf_counter() - self._began, {**self._attributes, **failed})

    def answered(self, sequence: Sequence) -> None:
        timings, further = sequence.timings, sequence.num_generated - 1
        self._observer.ttft.record(timings.ttft_ms / 1e3, self._attributes)
        if further > 0:
            self._observer.time_per_token.record(timings.decode_ms / 1e3 / further, self._attributes)
        self.span.note(
            {
                "gen_ai.usage.input_tokens": sequence.request.num_prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": sequence.usage.num_cached,
                "gen_ai.usage.output_tokens": sequence.num_generated,
                "gen_ai.latency.time_to_first_token": timings.ttft_ms / 1e3,
                "gen_ai.latency.time_in_queue": timings.queue_ms / 1e3,
                "gen_ai.latency.time_in_model_prefill": timings.prefill_ms / 1e3,
                "kvsidecar.restore_ms": timings.restore_ms,
            }
        )
