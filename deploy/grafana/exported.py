"""Metrics that the processes export to Prometheus, read from their code."""

from __future__ import annotations

from pathlib import Path

import httpx
from kvsidecar.integrations.vllm import transfer_stats as vllm

from cache_daemon.observability import reuse_metrics
from cache_daemon.observability.metric_definitions import COUNTERS, GAUGES, SECONDS
from inference_svc.gateway.fleet.fleet_metrics import FleetMetrics
from inference_svc.gateway.fleet.node_discovery import NodeDiscovery
from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.worker_router import WorkerRouter
from inference_svc.server import worker_metrics as worker

# Metrics of the daemon that are no fields of its statistics (cache_daemon/observability/prometheus_collector.py).
_EXTRA = {
    "durable_failing": "gauge",
    "remote_failing": "gauge",
    "loop_stall_seconds": "gauge",
    "remote_latency_seconds": "gauge",
    "calls_total": "counter",
    "call_seconds_total": "counter",
}
# Metrics of our connector in vLLM (clients/python/kvsidecar/integrations/vllm/vllm_metrics.py).
_VLLM = {f"vllm:kvsidecar_{name}_total": "counter" for name in (*vllm.COUNTERS, "lookups")} | {
    f"vllm:kvsidecar_{vllm.ATTACHED}": "gauge"
}
# The daemon's metrics of reuse by engine (cache_daemon/observability/reuse_metrics.py).
_REUSE = {f"kvsidecar_engine_{name}_total": "counter" for name in (*reuse_metrics.COUNTERS, *reuse_metrics.MISSES)}
_SUFFIXES = {"counter": "_total", "info": "_info"}
# Metrics of a worker that are no fields of its statistics (inference_svc/server/worker_metrics.py).
_WORKER_EXTRA = {
    "misses_total": "counter",
    "miss_tokens_total": "counter",
    "engine_up": "gauge",
    "corrupt_hits_total": "counter",
    **{f"{name}_total": "counter" for name in worker._CACHE},
}


def exported() -> dict[str, str]:
    """Return the type of every scraped metric by its name: gauge, counter or histogram.

    A histogram's name is without ``_bucket``.
    """
    found = {f"kvsidecar_cache_{name}": "gauge" for name in GAUGES if name not in SECONDS}
    found |= {f"kvsidecar_cache_{name}_total": "counter" for name in COUNTERS}
    found |= {f"kvsidecar_cache_{name}": kind for name, kind in _EXTRA.items()}
    found |= {f"kvsidecar_worker_{name}": "gauge" for name in worker._GAUGES}
    found |= {f"kvsidecar_worker_{name}_total": "counter" for name in worker._COUNTERS}
    found |= {f"kvsidecar_worker_{name}": kind for name, kind in _WORKER_EXTRA.items()}
    of_fleet = FleetMetrics()
    of_fleet.watch(NodeDiscovery([], httpx.AsyncClient(), 1.0))
    for registry in (GatewayMetrics(WorkerRouter([]), Path()).registry, of_fleet.registry):
        for family in registry.collect():
            found[family.name + _SUFFIXES.get(family.type, "")] = "gauge" if family.type == "info" else family.type
    return found | _REUSE | _VLLM
