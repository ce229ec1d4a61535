"""Metrics of a worker's process."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.node import Node, free_port


def test_loads_are_counted_in_bytes_and_seconds_beside_the_prefill_that_they_save() -> None:
    port, ids = free_port(), [10 + i * 7 % 4000 for i in range(700)]

    def scraped() -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
        return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}

    flags = {"metrics_port": port, "resident_sequences": 0}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        node.client().generate(ids, max_tokens=1)
        node.settle()
        first = scraped()
        assert first["kvsidecar_worker_loaded_bytes_total"] == first["kvsidecar_worker_load_seconds_total"] == 0
        answer = node.client().generate(ids, max_tokens=1)
        node.settle()
        second, stored = scraped(), node.cache_stats()
    assert answer.cached_tokens > 600
    per_token = stored.arena_used_bytes / stored.tokens
    assert second["kvsidecar_worker_stored_bytes_total"] > 0.9 * per_token * 700
    assert second["kvsidecar_worker_loaded_bytes_total"] > 0.9 * per_token * answer.cached_tokens
    assert 0 < second["kvsidecar_worker_load_seconds_total"] < 30
    assert second["kvsidecar_worker_saved_prefill_seconds_total"] > 0
