"""What the daemon tells about itself: metrics, health, traces of its traffic, spans."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cli.node_commands import parts_in
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.node import Node, free_port
from cache_daemon.durable.durable_tier import TierFailed
from cache_daemon.observability.metric_definitions import COUNTERS, GAUGES
from cache_daemon.observability.tier_health import DURABLE, report_health
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.operators import daemon_that_ends
from tests.cache_daemon.stores import opened

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


# ---- metrics ------------------------------------------------------------------------------------------------


def scrape(port: int) -> dict[str, float]:
    """Sums over labels, by the names of samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_prometheus_has_every_number_of_stats(start: Callable[..., Node]) -> None:
    port = free_port()
    node = start(metrics_port=port)
    peer = Peer(node)
    peer.put(FIRST)
    peer.read(FIRST)
    node.settle()
    found, stats = scrape(port), peer.stats()
    for name in GAUGES.keys() - {"uptime_seconds", "loop_stall_ms"}:
        assert found[f"kvsidecar_cache_{name}"] == getattr(stats, name), name
    for name in COUNTERS:
        assert found[f"kvsidecar_cache_{name}_total"] == getattr(stats, name), name
    assert found["kvsidecar_cache_durable_failing"] == 0
    assert found["kvsidecar_cache_calls_total"] >= 4
    peer.close()


def test_every_number_of_stats_has_a_metric() -> None:
    described = {f.name for f in pb.StatsResponse.DESCRIPTOR.fields}
    assert described - GAUGES.keys() - COUNTERS.keys() == {
        "epoch", "durable_failing", "remote_engine", "remote_failing", "session_details", "calls"
    }  # fmt: skip


def test_every_metric_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
    began = page.index("## Metrics")
    watching = page[began : page.index("## Health", began)]
    missing = [
        name for name in (*GAUGES, *COUNTERS, "durable_failing", "remote_failing") if f"`{name}`" not in watching
    ]
    assert not missing


def test_a_taken_metrics_port_is_said_in_a_sentence(start: Callable[..., Node], tmp_path: Path) -> None:
    port = free_port()
    start(metrics_port=port)
    result = daemon_that_ends(tmp_path, "--metrics-port", port)
    assert result.returncode == 2
    assert f"127.0.0.1:{port}: Address already in use; choose another --metrics-port" in result.stderr


# ---- health -------------------------------------------------------------------------------------------------


def health_of(node: Node, name: str = "") -> int:
    with node.cache_channel() as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=30).status)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_a_daemon_without_a_store_has_no_health_of_one(start: Callable[..., Node]) -> None:
    node = start(store="none")
    assert health_of(node) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health_of(node, DURABLE)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_durable_tier_is_not_serving_while_it_cannot_be_written() -> None:
    said: list[tuple[str, int]] = []

    async def set_health(name: str, status: int) -> None:
        said.append((name, status))

    async with opened() as bench:
        writer = bench.store.tiers.writer
        assert writer is not None
        async with report_health(DURABLE, lambda: writer.failing, set_health, grace_seconds=1.0):
            assert said == [(DURABLE, SERVING)]
            bench.tier.fail_applies(10_000, TierFailed("the disk is gone"))
            began = time.monotonic()
            await bench.put(FIRST)
            while len(said) < 2:
                await asyncio.sleep(0.05)
                assert time.monotonic() - began < 30
            assert said[-1] == (DURABLE, NOT_SERVING)
            assert time.monotonic() - began > 0.9, "a short failure is none"
            bench.tier._apply_errors.clear()
            await bench.put(SECOND)
            while len(said) < 3:
                await asyncio.sleep(0.05)
                assert time.monotonic() - began < 60
            assert said[-1] == (DURABLE, SERVING)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_shows_in_health_and_stats_and_the_daemon_goes_on(
    start: Callable[..., Node], small_disk: Path
) -> None:
    node = start(store=small_disk / "store", store_bytes="64MiB", arena_bytes="16MiB")
    peer = Peer(node)
    peer.put(FIRST)
    node.settle()
    assert health_of(node, DURABLE) == SERVING
    (small_disk / "other").write_bytes(b"\0" * free_bytes(small_disk))
    began, unsaved = time.monotonic(), set()
    for n in range(20):
        unsaved.add(peer.put([n, 1] * 100))
        time.sleep(1.0)
        if health_of(node, DURABLE) == NOT_SERVING:
            break
    stats = peer.stats()
    assert health_of(node, DURABLE) == NOT_SERVING, stats
    assert time.monotonic() - began > 9, "a short failure is none"
    assert health_of(node) == SERVING
    assert "full" in stats.durable_failing
    assert stats.failed_writes > 0
    assert "writing fails: " in cache_detail(node)
    assert peer.read([0, 1] * 100) == 200, "what is in memory is served"
    (small_disk / "other").unlink()
    assert until(lambda: health_of(node, DURABLE) == SERVING, 60), "it is tried again without being asked"
    assert until(lambda: unsaved <= durable_of(peer), 60), "what waited is written"
    assert peer.stats().durable_failing == ""
    assert re.search(r"; \d+ writes to disk have failed$", cache_detail(node)), "kvsidecar status"
    peer.close()


def cache_detail(node: Node) -> str:
    return next(part.detail for part in parts_in(node.cache_socket.parent) if part.name == "cache")


def durable_of(peer: Peer) -> set[bytes]:
    return {c.prefix_hash for c in peer.stub.List(pb.ListRequest(page_size=1000)).chunks if c.durable}


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
