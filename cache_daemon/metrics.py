"""Prometheus metrics, read from the store's statistics when scraped. docs/operations.md says when to worry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvsidecar.cache.v1.cache_pb2 import StatsResponse
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_daemon.rpc.door import Shared

GAUGES = {
    "uptime_seconds": "Seconds since the start",
    "sessions": "Sessions attached",
    "chunks": "Chunks stored",
    "tokens": "Tokens in stored chunks",
    "arena_bytes": "Size of the arena",
    "arena_used_bytes": "Arena bytes in use",
    "arena_chunks": "Chunks in the arena",
    "durable_budget_bytes": "Budget of the durable tier",
    "durable_bytes": "Bytes in use in the durable tier",
    "durable_file_bytes": "Size of the durable tier's file",
    "durable_chunks": "Chunks in the durable tier",
    "leases": "Read leases held",
    "reservations": "Reservations open",
    "pending_writes": "Chunks waiting to be written to the durable tier",
    "pinned_bytes": "Payload bytes of pinned chunks",
    "loop_stall_ms": "Longest stall of the event loop in the last minute, in milliseconds",
}
COUNTERS = {
    "prompts": "Prompts that workers served",
    "prompt_tokens": "Tokens of these prompts",
    "cached_tokens": "Tokens of these prompts that were not computed anew",
    "pool_tokens": "Of the cached tokens, those that were in a worker's own pool",
    "matches": "Match calls, and prompts that needed none",
    "requested_tokens": "Tokens asked for in them",
    "matched_tokens": "Tokens found in them",
    "content_tokens": "Tokens found by content, beyond the prefix",
    "promoted_tokens": "Tokens brought in from the durable tier",
    "commits": "Chunks committed",
    "arena_evictions": "Chunks dropped from the arena to make room",
    "durable_evictions": "Chunks dropped from the durable tier to make room",
    "expired_chunks": "Chunks whose time to live had passed",
    "corrupt_chunks": "Chunks whose checksum, header or length did not hold",
    "failed_writes": "Chunks that could not be made durable at the first try",
    "refused": "Requests that a limit or a quota refused",
}
_PREFIX = "kvsidecar_cache_"


class StoreCollector:
    """Reads the statistics on the store's own loop."""

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        self._shared, self._loop = shared, loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> StatsResponse:
            stats = self._shared.store.stats()
            stats.loop_stall_ms, stats.refused = self._shared.stall_ms(), self._shared.calls.refused
            return stats

        stats = asyncio.run_coroutine_threadsafe(read(), self._loop).result(timeout=5)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
        yield GaugeMetricFamily(
            _PREFIX + "durable_failing",
            "1 while the durable tier cannot be written to",
            value=bool(stats.durable_failing),
        )
        calls = self._shared.calls
        counted = CounterMetricFamily(_PREFIX + "calls", "Calls by method and outcome", labels=("method", "status"))
        for (method, status), count in list(calls.totals.items()):
            counted.add_metric((method, status), count)
        yield counted
        spent = CounterMetricFamily(_PREFIX + "call_seconds", "Time spent in calls by method", labels=("method",))
        for method, seconds in list(calls.seconds.items()):
            spent.add_metric((method,), seconds)
        yield spent


def serve_metrics(shared: Shared, port: int) -> None:
    """Serves ``/metrics`` on 127.0.0.1. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(shared, asyncio.get_running_loop()))
    start_http_server(port, "127.0.0.1", registry)
