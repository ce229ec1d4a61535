"""Prometheus metrics, read from the store's statistics when scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_daemon.store import ChunkStore

_GAUGES = {
    "sessions": "Sessions attached",
    "chunks": "Chunks stored",
    "tokens": "Tokens in stored chunks",
    "arena_bytes": "Size of the host arena",
    "arena_used_bytes": "Arena bytes in use",
    "durable_bytes": "Payload bytes in the durable tier",
    "leases": "Read leases held",
    "reservations": "Reservations open",
    "pending_writes": "Chunks waiting to be written to the durable tier",
}
_COUNTERS = {
    "matches": "Match calls",
    "requested_tokens": "Tokens asked for in Match calls",
    "matched_tokens": "Tokens found in Match calls",
    "content_tokens": "Tokens found by content, beyond the prefix",
    "promoted_tokens": "Tokens brought in from the durable tier",
    "commits": "Chunks committed",
    "arena_evictions": "Chunks dropped from the arena",
    "durable_evictions": "Chunks dropped from the durable tier",
    "corrupt_chunks": "Chunks whose checksum or length did not hold",
    "failed_writes": "Chunks that could not be made durable",
}


class StoreCollector:
    """Reads the statistics on the store's own loop."""

    def __init__(self, store: ChunkStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._loop = store, loop

    def collect(self) -> Iterable[Metric]:
        async def read() -> object:
            return self._store.stats()

        stats = asyncio.run_coroutine_threadsafe(read(), self._loop).result(timeout=5)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"kvsidecar_cache_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"kvsidecar_cache_{name}", text, value=getattr(stats, name))


def serve_metrics(store: ChunkStore, port: int) -> None:
    """Serves ``/metrics`` on 127.0.0.1. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store, asyncio.get_running_loop()))
    start_http_server(port, "127.0.0.1", registry)
