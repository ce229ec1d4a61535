"""OpenTelemetry collector in the process of the test."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc


class Collector:
    """An OTLP collector that keeps the spans and metrics it receives."""

    def __init__(self, port: int) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces

        self.spans: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.metrics: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(2))
        for module, service, kept in ((traces, "TraceService", self.spans), (metrics, "MetricsService", self.metrics)):
            self._server.add_generic_rpc_handlers((self._handler(module, service, kept),))
        self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @staticmethod
    def _handler(module: Any, service: str, kept: queue.SimpleQueue[Any]) -> grpc.GenericRpcHandler:
        name = module.DESCRIPTOR.services_by_name[service].full_name
        kind = service.removesuffix("Service")
        asked = getattr(module, f"Export{kind}ServiceRequest")
        answered = getattr(module, f"Export{kind}ServiceResponse")

        def export(request: Any, _: Any) -> Any:
            kept.put(request)
            return answered()

        method = grpc.unary_unary_rpc_method_handler(export, asked.FromString, answered.SerializeToString)
        return grpc.method_handlers_generic_handler(name, {"Export": method})

    def close(self) -> None:
        self._server.stop(None).wait()

    def sent(self) -> list[Any]:
        """Return the spans that arrived since the last call, as OTLP messages."""
        found = []
        while not self.spans.empty():
            for resource in self.spans.get().resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found
