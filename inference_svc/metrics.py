"""Prometheus metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inference_svc.runtime import Runtime

_GAUGES = (
    "running",
    "waiting",
    "pool_pages",
    "pool_free_pages",
    "cache_attached",
    "pending_saves",
    "resident_sequences",
)
_COUNTERS = (
    "requests",
    "cancelled",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "cache_failures",
    "preemptions",
    "resident_tokens",
    "approximate_tokens",
    "recomputed_tokens",
    "stored_chunks",
    "refused_chunks",
)


class WorkerCollector:
    """Reads the counters when scraped."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Metric]:
        from inference_svc.service import worker_stats

        stats = worker_stats(self._runtime)
        for name in _GAUGES:
            yield GaugeMetricFamily(f"kvsidecar_worker_{name}", name.replace("_", " "), value=getattr(stats, name))
        for name in _COUNTERS:
            yield CounterMetricFamily(f"kvsidecar_worker_{name}", name.replace("_", " "), value=getattr(stats, name))


def serve_metrics(runtime: Runtime, port: int, host: str) -> None:
    """Serves ``/metrics``. Raises OSError when the address is taken."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(runtime))
    start_http_server(port, host, registry)
