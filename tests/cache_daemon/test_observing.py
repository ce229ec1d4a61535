"""What the daemon tells about itself: metrics, health, traces of its traffic, spans."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub, add_CacheServiceServicer_to_server
from kvsidecar.cli.cache.trace import summarize
from kvsidecar.errors import InvalidRequest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import eviction_traces
from benchmarks.node import Node
from cache_daemon.access.principal import OPERATOR
from cache_daemon.durable.memory import MemoryTier
from cache_daemon.durable.tier import TierFailed
from cache_daemon.eviction import DEFAULT, POLICIES
from cache_daemon.memory.arena import MemoryArena
from cache_daemon.observe import telemetry
from cache_daemon.observe.health import DURABLE, reporting_durable
from cache_daemon.observe.names import COUNTERS, GAUGES
from cache_daemon.observe.snapshot import Snapshots
from cache_daemon.observe.traffic import BLOCK_TOKENS, TrafficTrace, block_ids
from cache_daemon.rpc.calls import Calls
from cache_daemon.rpc.door import Shared
from cache_daemon.rpc.service import CacheService
from cache_daemon.store.chunk import Residency
from cache_daemon.store.facade import ChunkStore
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.stores import Bench, FakeClock, opened

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_prometheus_has_every_number_of_stats(start: Callable[..., Node], free_port: int) -> None:
    node = start(metrics_port=free_port)
    peer = Peer(node)
    peer.put(FIRST)
    peer.read(FIRST)
    node.settle()
    found, stats = scrape(free_port), peer.stats()
    for name in GAUGES.keys() - {"uptime_seconds", "loop_stall_ms"}:
        assert found[f"kvsidecar_cache_{name}"] == getattr(stats, name), name
    for name in COUNTERS:
        assert found[f"kvsidecar_cache_{name}_total"] == getattr(stats, name), name
    assert found["kvsidecar_cache_durable_failing"] == 0
    assert found["kvsidecar_cache_calls_total"] >= 4
    peer.close()


def test_every_number_of_stats_has_a_metric() -> None:
    described = {f.name for f in pb.StatsResponse.DESCRIPTOR.fields}
    assert described - GAUGES.keys() - COUNTERS.keys() == {"epoch", "durable_failing", "session_details", "calls"}


def test_every_metric_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    watching = page[page.index("## Watching") : page.index("**Health.**")]
    missing = [name for name in (*GAUGES, *COUNTERS, "durable_failing") if f"`{name}`" not in watching]
    assert not missing


def test_a_taken_metrics_port_is_said_in_a_sentence(start: Callable[..., Node], free_port: int, tmp_path: Path) -> None:
    start(metrics_port=free_port)
    result = daemon_that_ends(tmp_path, "--metrics-port", free_port)
    assert result.returncode == 2
    assert f"127.0.0.1:{free_port}: Address already in use; choose another --metrics-port" in result.stderr


def daemon_that_ends(folder: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    folder.chmod(0o700)
    command = [sys.executable, "-m", "cache_daemon", "--socket", folder / "s", "--store", "none", *flags]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


# ---- health -------------------------------------------------------------------------------------------------


def health_of(node: Node, name: str = "") -> int:
    with node.cache_channel() as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


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
        async with reporting_durable(lambda: writer.failing, set_health, patience_seconds=1.0):
            assert said == [(DURABLE, SERVING)]
            bench.tier.fail_applies(10_000, TierFailed("the disk is gone"))
            await bench.put(FIRST)
            began = time.monotonic()
            while len(said) < 2:
                await asyncio.sleep(0.05)
                assert time.monotonic() - began < 10
            assert said[-1] == (DURABLE, NOT_SERVING)
            assert time.monotonic() - began > 0.9, "a short failure is none"
            bench.tier._apply_errors.clear()
            await bench.put(SECOND)
            while len(said) < 3:
                await asyncio.sleep(0.05)
                assert time.monotonic() - began < 20
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
    assert peer.read([0, 1] * 100) == 200, "what is in memory is served"
    (small_disk / "other").unlink()
    assert until(lambda: health_of(node, DURABLE) == SERVING, 20), "it is tried again without being asked"
    assert until(lambda: unsaved <= durable_of(peer), 20), "what waited is written"
    assert peer.stats().durable_failing == ""
    peer.close()


def durable_of(peer: Peer) -> set[bytes]:
    return {c.prefix_hash for c in peer.stub.List(pb.ListRequest(page_size=1000)).chunks if c.durable}


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


# ---- traces of traffic --------------------------------------------------------------------------------------


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_blocks_have_the_same_id_as_long_as_prompts_are_the_same() -> None:
    root, prompt = bytes(32), list(range(3 * BLOCK_TOKENS))
    whole = list(block_ids(b"k", root, keys.token_bytes(prompt)))
    longer = list(block_ids(b"k", root, keys.token_bytes([*prompt, 5])))
    other = list(block_ids(b"k", root, keys.token_bytes([*prompt[: 2 * BLOCK_TOKENS], *prompt[:BLOCK_TOKENS]])))
    assert longer[:3] == whole
    assert len(longer) == 4
    assert other[:2] == whole[:2]
    assert other[2] not in whole, "a block is one in its context"
    assert not set(whole) & set(block_ids(b"k", b"\1" * 32, keys.token_bytes(prompt))), "tenants share nothing"
    assert not set(whole) & set(block_ids(b"l", root, keys.token_bytes(prompt))), "another key, other ids"
    assert max(*whole, *longer, *other) < 1 << 53, "every reader of JSON keeps them exact"


def test_a_daemon_records_all_that_is_asked_for_and_no_tokens(start: Callable[..., Node], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    node = start(trace=file)
    peer = Peer(node)
    assert not peer.welcome.HasField("summary"), "workers ask for prompts of which nothing is stored, too"
    secret = [123456789, 987654321]
    prompt = secret * BLOCK_TOKENS
    for ids in (prompt, prompt, [*prompt, 7], secret):
        peer.match(ids)
    peer.match(prompt, salt=b"another")
    peer.close()
    node.kill("daemon", 15)
    found = lines_of(file)
    assert [line["input_length"] for line in found] == [1024, 1024, 1025, 2, 1024]
    first, again, longer, short, another = (line["hash_ids"] for line in found)
    assert first == again == longer[:2]
    assert len(longer) == 3
    assert not {*short, *another} & set(first)
    assert all(line.keys() == {"timestamp", "input_length", "output_length", "hash_ids"} for line in found)
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    text = file.read_text()
    assert not any(str(token) in text for token in secret)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_trace_ends_at_its_size_and_says_so(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1000)
    for i in range(100):
        trace.asked(bytes(32), keys.token_bytes([i] * 100))
    trace.close()
    assert (tmp_path / "trace").stat().st_size <= 1000
    assert 5 < len(lines_of(tmp_path / "trace")) < 20, "whole lines"
    assert not trace.complete
    assert trace.left_out > 0


def test_an_earlier_trace_is_kept(tmp_path: Path) -> None:
    for i in range(3):
        trace = TrafficTrace(tmp_path / "trace", 1 << 20)
        trace.asked(bytes(32), keys.token_bytes([0] * (i + 1)))
        trace.close()
    assert [line["input_length"] for line in lines_of(tmp_path / "trace")] == [3]
    assert [line["input_length"] for line in lines_of(tmp_path / "trace.1")] == [2]


def test_a_trace_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    result = daemon_that_ends(tmp_path, "--trace", tmp_path / "missing" / "trace")
    assert result.returncode == 2
    assert "No such file or directory; choose another --trace" in result.stderr


def test_a_summary_says_what_a_cache_without_limit_would_have(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1 << 20)
    system = list(range(BLOCK_TOKENS))
    for prompt in (system + [1] * 512, system + [2] * 512, system + [1] * 512):
        trace.asked(bytes(32), keys.token_bytes(prompt))
    trace.close()
    found = summarize(tmp_path / "trace")
    assert (found.prompts, found.tokens, found.blocks, found.working_set_tokens) == (3, 3072, 3, 1536)
    assert found.most_hit_ratio == 0.5
    assert found.repeated_prompts == 1


def test_a_summary_refuses_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"timestamp": 1, "input_length": 2, "hash_ids": []}\nnonsense\n')
    with pytest.raises(InvalidRequest, match="line 2 of"):
        summarize(tmp_path / "x")


def test_policies_are_judged_on_a_recorded_trace(tmp_path: Path) -> None:
    trace = TrafficTrace(tmp_path / "trace", 1 << 20)
    for prompt in ([1] * 600, [1] * 600, [1] * 512 + [2] * 100):
        trace.asked(bytes(32), keys.token_bytes(prompt))
    trace.close()
    found = eviction_traces.read(str(tmp_path / "trace"))
    assert [(r.tokens, len(r.path)) for r in found] == [(600, 2), (600, 2), (612, 2)]
    assert found[0].path == found[1].path
    assert found[0].path[0] is found[2].path[0]


# ---- spans --------------------------------------------------------------------------------------------------


@dataclass
class Traced:
    """A service in this process, its channel, and what its telemetry has."""

    bench: Bench
    stub: Any
    channel: grpc.aio.Channel
    exporter: Any
    reader: Any

    async def spans(self) -> dict[str, Any]:
        """Finished spans by the last part of their name; waits for calls to end on the server, too."""
        await asyncio.sleep(0.05)
        return {span.name.rpartition("/")[2]: span for span in self.exporter.get_finished_spans()}


@asynccontextmanager
async def traced(folder: Path) -> AsyncIterator[Traced]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    async with telemetry.exporting(SimpleSpanProcessor(exporter), reader) as telling:
        store = ChunkStore(
            MemoryArena(4 << 20), MemoryTier(), 1 << 20, POLICIES[DEFAULT], staging_bytes=1 << 20,
            clock=FakeClock(), around=telling.work_span,
        )  # fmt: skip
        await store.start()
        bench = Bench(store, store._durable, FakeClock())  # type: ignore[arg-type]
        bench.session.owner = OPERATOR
        shared = Shared(store, 2000, Calls(telling.call_span))
        telling.observe(Snapshots(shared, asyncio.get_running_loop()))
        server = grpc.aio.server()
        server.add_insecure_port(f"unix:{folder}/s")
        add_CacheServiceServicer_to_server(CacheService(shared, lambda _: OPERATOR, "m"), server)
        await server.start()
        channel = grpc.aio.insecure_channel(f"unix:{folder}/s")
        try:
            yield Traced(bench, CacheServiceStub(channel), channel, exporter, reader)
        finally:
            await channel.close()
            await server.stop(None)
            await store.close()


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_call_is_a_span_under_its_callers(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        await t.bench.put(FIRST)
        request = pb.MatchRequest(session_id=t.bench.session.id, token_ids=FIRST)
        await t.stub.Match(request, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))
        await t.stub.Stats(pb.StatsRequest())
        spans = await t.spans()
        match, stats = spans["Match"], spans["Stats"]
        assert match.name == "kvsidecar.cache.v1.CacheService/Match"
        assert (f"{match.context.trace_id:032x}", f"{match.parent.span_id:016x}") == (TRACE, PARENT)
        assert stats.parent is None
        assert match.attributes["rpc.method"] == "Match"
        assert match.kind.name == "SERVER"


async def test_copies_and_reads_are_spans_within_their_call(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        store, session = t.bench.store, t.bench.session
        reserved = store.reserve(session, b"", [t.bench.header(FIRST)])[0]
        reservation, checksum = t.bench.fill(reserved, FIRST)
        item = pb.CommitItem(reservation_id=reservation, checksum=checksum)
        answer = await t.stub.Commit(pb.CommitRequest(session_id=session.id, epoch=store.epoch, items=[item]))
        assert answer.committed == 1
        spans = await t.spans()
        assert spans["copy"].parent.span_id == spans["Commit"].context.span_id
        await store.settle()
        chunk = store.probe(t.bench.root(), keys.token_bytes(FIRST))[0][0]
        assert chunk.on_disk is Residency.PRESENT
        store.tiers._free_slot(chunk)
        found = await t.stub.Match(pb.MatchRequest(session_id=session.id, token_ids=FIRST))
        assert found.promoted_tokens == len(FIRST)
        spans = await t.spans()
        assert spans["durable read"].parent.span_id == spans["Match"].context.span_id


async def test_a_refused_call_is_an_error_with_its_reason_and_no_secret(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        with pytest.raises(grpc.aio.AioRpcError):
            await t.stub.Match(pb.MatchRequest(session_id=b"x" * 16, token_ids=FIRST, tenant_salt=b"secret"))
        span = (await t.spans())["Match"]
        assert span.attributes["error.type"] == "UNKNOWN_SESSION"
        assert span.status.status_code.name == "ERROR"
        assert not span.events, "no tracebacks: they may hold what was asked"
        assert "secret" not in span.to_json()


async def test_metrics_of_opentelemetry_are_the_daemons(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        await t.bench.put(FIRST)
        await t.stub.Stats(pb.StatsRequest())
        data = await asyncio.to_thread(t.reader.get_metrics_data)
        metrics = {m.name: m for s in data.resource_metrics for scope in s.scope_metrics for m in scope.metrics}
        names = {f"kvsidecar.cache.{name}" for name in (*GAUGES, *COUNTERS, "durable_failing", "calls")}
        assert metrics.keys() == names
        assert [p.value for p in metrics["kvsidecar.cache.tokens"].data.data_points] == [4]
        assert [p.value for p in metrics["kvsidecar.cache.commits"].data.data_points] == [1]
        calls = {p.attributes["rpc.method"]: p.value for p in metrics["kvsidecar.cache.calls"].data.data_points}
        assert calls == {"Stats": 1}


class Collector:
    """An OTLP collector that keeps what it gets."""

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


def test_a_daemon_sends_to_a_collector(start: Callable[..., Node], free_port: int) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    collector = Collector(free_port)
    try:
        node = start(otlp_endpoint=f"http://127.0.0.1:{free_port}")
        peer = Peer(node)
        peer.put(FIRST)
        peer.close()
        node.kill("daemon", 15)
        resource = collector.metrics.get(timeout=10).resource_metrics[0].resource
        assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "kvsidecar-cache"
        names = []
        while not collector.spans.empty():
            request = collector.spans.get()
            names += [s.name for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
        assert {"kvsidecar.cache.v1.CacheService/Commit", "copy"} <= set(names)
    finally:
        collector.close()


def test_an_endpoint_without_a_scheme_is_refused(tmp_path: Path) -> None:
    result = daemon_that_ends(tmp_path, "--otlp-endpoint", "localhost:4317")
    assert result.returncode == 2
    assert "must begin with http://" in result.stderr


def test_telemetry_is_off_unless_an_endpoint_is_set() -> None:
    assert not telemetry.wanted("", {})
    assert telemetry.wanted("http://there:4317", {})
    assert telemetry.wanted("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:4317"})
    assert not telemetry.wanted("http://there:4317", {"OTEL_SDK_DISABLED": "true"})


def test_a_daemon_that_does_not_trace_does_not_load_opentelemetry() -> None:
    code = "import sys, cache_daemon.server; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_worker_names_its_span_where_it_has_one(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider

    from inference_svc.cache.trace_context import with_trace_context

    seen: list[list[str]] = []

    def hear(request: bytes, context: grpc.ServicerContext) -> bytes:
        named = [value for key, value in context.invocation_metadata() if key == "traceparent"]
        seen.append([value.rpartition("-")[0] for value in named])  # without the flags
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Hear": grpc.unary_unary_rpc_method_handler(hear)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", handlers),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path}/s") as channel:
        call = with_trace_context(channel).unary_unary("/S/Hear")
        call(b"")
        with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("request") as span:
            call(b"")
            future = call.future(b"")
            future.result()
            expected = f"00-{span.get_span_context().trace_id:032x}-{span.get_span_context().span_id:016x}"
    server.stop(None).wait()
    assert seen == [[], [expected], [expected]]
