"""Prometheus metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterable

from kvsidecar.telemetry.build_info import BuildInfoCollector
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inference_svc.kv_client.client_context import CacheStats
from inference_svc.server.runtime import Runtime
from inference_svc.server.worker_stats import worker_stats

_GAUGES = (
    "running",
    "waiting",
    "pool_pages",
    "pool_free_pages",
    "overflow_pages",
    "overflow_free_pages",
    "cache_attached",
    "pending_saves",
    "resident_sequences",
)
# These metrics have vLLM's names behind our prefix.
_SPECULATION = {
    "spec_decode_num_drafts": ("drafts", "Drafts that were verified"),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Draft tokens that were verified"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted"),
    "spec_decode_num_branches": (
        "draft_branches",
        "Branches verified beside the first of a draft",
    ),
    "spec_decode_num_branched_tokens": ("branched_tokens", "Accepted tokens of such a branch"),
    "spec_decode_draft_seconds": ("draft_seconds", "Time spent on proposing draft tokens"),
    "spec_decode_verify_seconds": ("verify_seconds", "Time of verification steps"),
}
_COUNTERS = (
    "requests",
    "cancelled",
    "prompt_tokens",
    "skipping_requests",
    "skipping_tokens",
    "cached_tokens",
    "generated_tokens",
    "cache_failures",
    "bypassed_requests",
    "preemptions",
    "overflowed",
    "resident_tokens",
    "approximate_tokens",
    "recomputed_tokens",
    "stored_chunks",
    "refused_chunks",
)
# Metrics with the values of fields of CacheStats.
_CACHE = {
    "loaded_bytes": "Bytes of chunks that were copied into the pool",
    "stored_bytes": "Bytes of chunks that were written for the daemon",
    "load_seconds": "Time of lookups and copies that loaded chunks",
    "saved_prefill_seconds": "Estimated time that computing the loaded tokens would have taken",
}
_STREAM_GAUGES = ("resident_bytes", "pass_bytes")
_STREAM_COUNTERS = ("hits", "waits", "misses", "read_bytes", "read_seconds", "wait_seconds")


class WorkerCollector:
    """Prometheus collector that reads a worker's counters at each scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Metric]:
        stats = worker_stats(self._runtime)
        streaming = stats.streaming
        for name in _GAUGES:
            yield GaugeMetricFamily(f"kvsidecar_worker_{name}", name.replace("_", " "), value=getattr(stats, name))
        text = "Reused prefixes with values that were not finite, which were computed instead"
        hits = self._runtime.engine.stats.corrupt_hits
        yield CounterMetricFamily("kvsidecar_worker_corrupt_hits", text, value=hits)
        text = "1 while the engine works; 0 when it has stopped, or when its step hangs"
        yield GaugeMetricFamily("kvsidecar_worker_engine_up", text, value=float(not self._runtime.engine.ailment))
        for name in _COUNTERS:
            yield CounterMetricFamily(f"kvsidecar_worker_{name}", name.replace("_", " "), value=getattr(stats, name))
        cache = self._runtime.cache.stats if self._runtime.cache is not None else CacheStats()
        for name, text in _CACHE.items():
            yield CounterMetricFamily(f"kvsidecar_worker_{name}", text, value=getattr(cache, name))
        for name, (field, text) in _SPECULATION.items():
            yield CounterMetricFamily(f"kvsidecar_worker_{name}", text, value=getattr(stats, field))
        places = CounterMetricFamily(
            "kvsidecar_worker_spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position, from 0",
            labels=["position"],
        )
        for place, count in enumerate(stats.accepted_at):
            places.add_metric([str(place)], count)
        yield places
        requests = CounterMetricFamily(
            "kvsidecar_worker_misses", "Requests that computed more than the last token, by reason", labels=["kind"]
        )
        tokens = CounterMetricFamily("kvsidecar_worker_miss_tokens", "Tokens that they computed", labels=["kind"])
        for miss in stats.misses:
            requests.add_metric([miss.kind], miss.requests)
            tokens.add_metric([miss.kind], miss.tokens)
        yield from (requests, tokens)
        for name in _STREAM_GAUGES:
            text = f"streaming of layers: {name.replace('_', ' ')}"
            yield GaugeMetricFamily(f"kvsidecar_worker_stream_{name}", text, value=getattr(streaming, name))
        for name in _STREAM_COUNTERS:
            text = f"streaming of layers: {name.replace('_', ' ')}"
            yield CounterMetricFamily(f"kvsidecar_worker_stream_{name}", text, value=getattr(streaming, name))


def serve_metrics(runtime: Runtime, port: int, host: str) -> None:
    """Serve ``/metrics``. Raises OSError if the address is taken."""
    registry = CollectorRegistry()
    registry.register(BuildInfoCollector("worker"))
    registry.register(WorkerCollector(runtime))
    start_http_server(port, host, registry)
