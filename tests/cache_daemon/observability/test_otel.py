"""OpenTelemetry: spans and metrics if an endpoint is set, else nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub, add_CacheServiceServicer_to_server
from kvsidecar.kv_transfer.session_channel import SessionChannel
from kvsidecar.telemetry.otel_export import is_enabled, sdk_providers

from benchmarks.condition_wait import until_async
from benchmarks.node import Node, free_port
from cache_daemon.auth.principal import OPERATOR
from cache_daemon.eviction import DEFAULT, POLICIES
from cache_daemon.memory.arena import MemoryArena
from cache_daemon.observability import otel
from cache_daemon.observability.call_metrics import CallMetrics
from cache_daemon.observability.metric_definitions import COUNTERS, GAUGES
from cache_daemon.observability.reuse_metrics import COUNTERS as COUNTERS_OF_REUSE
from cache_daemon.observability.reuse_metrics import ReuseMetrics
from cache_daemon.observability.stats_snapshot import StatsSnapshots
from cache_daemon.rpc.cache_service import CacheService
from cache_daemon.rpc.servicer_base import ServiceState
from cache_daemon.store.chunk import Residency
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.store_config import StoreConfig
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.operators import daemon_that_ends
from tests.cache_daemon.stores import Bench, FakeClock
from tests.collector import Collector

FIRST = [1, 2, 3, 4]


@dataclass
class Traced:
    """A service in this process, with a channel to it and its telemetry."""

    bench: Bench
    stub: Any
    channel: grpc.aio.Channel
    exporter: Any
    reader: Any
    reuse: ReuseMetrics

    async def spans(self, *names: str) -> dict[str, Any]:
        """Wait until the calls have ended on the server, too; return finished spans by the last part of their names."""

        def found() -> dict[str, Any]:
            return {span.name.rpartition("/")[2]: span for span in self.exporter.get_finished_spans()}

        await until_async(lambda: found().keys() >= set(names))
        return found()


@asynccontextmanager
async def traced(folder: Path) -> AsyncIterator[Traced]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    async with sdk_providers(otel.SERVICE_NAME, SimpleSpanProcessor(exporter), reader) as providers:
        telling = otel.telemetry_for(providers)
        store = ChunkStore(
            MemoryArena(4 << 20), MemoryTier(),
            StoreConfig(POLICIES[DEFAULT], 1 << 20, 1 << 20, clock=FakeClock(), span=telling.work_span),
        )  # fmt: skip
        await store.start()
        bench = Bench(store, store._durable, FakeClock())  # type: ignore[arg-type]
        bench.session.owner = OPERATOR
        shared = ServiceState(store, 2000, CallMetrics(telling.call_span))
        telling.observe(StatsSnapshots(shared.stats, shared.calls, shared.reuse, asyncio.get_running_loop()))
        server = grpc.aio.server()
        server.add_insecure_port(f"unix:{folder}/s")
        add_CacheServiceServicer_to_server(CacheService(shared, lambda _: OPERATOR, "m"), server)
        await server.start()
        channel = grpc.aio.insecure_channel(f"unix:{folder}/s")
        try:
            yield Traced(bench, CacheServiceStub(channel), channel, exporter, reader, shared.reuse)
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
        spans = await t.spans("Match", "Stats")
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
        spans = await t.spans("copy", "Commit")
        assert spans["copy"].parent.span_id == spans["Commit"].context.span_id
        await store.settle()
        chunk = store.probe(t.bench.root(), keys.token_bytes(FIRST))[0][0]
        assert chunk.disk_state is Residency.PRESENT
        store.tiers._free_slot(chunk)
        found = await t.stub.Match(pb.MatchRequest(session_id=session.id, token_ids=FIRST))
        assert found.promoted_tokens == len(FIRST)
        spans = await t.spans("durable read", "Match")
        assert spans["durable read"].parent.span_id == spans["Match"].context.span_id


async def test_a_refused_call_is_an_error_with_its_reason_and_no_secret(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        with pytest.raises(grpc.aio.AioRpcError):
            await t.stub.Match(pb.MatchRequest(session_id=b"x" * 16, token_ids=FIRST, tenant_salt=b"secret"))
        span = (await t.spans("Match"))["Match"]
        assert span.attributes["error.type"] == "UNKNOWN_SESSION"
        assert span.status.status_code.name == "ERROR"
        assert not span.events, "no tracebacks: they may hold what was asked"
        assert "secret" not in span.to_json()
        missing = pb.PrefixRef(root=t.bench.root(), prefix_hash=b"h" * 32)
        with pytest.raises(grpc.aio.AioRpcError, match=missing.prefix_hash.hex()):
            await t.stub.Pin(pb.PinRequest(prefix=missing))
        assert missing.prefix_hash.hex() not in (await t.spans("Pin"))["Pin"].to_json()


async def test_metrics_of_opentelemetry_are_the_daemons(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        await t.bench.put(FIRST)
        await t.stub.Stats(pb.StatsRequest())
        data = await asyncio.to_thread(t.reader.get_metrics_data)
        metrics = {m.name: m for s in data.resource_metrics for scope in s.scope_metrics for m in scope.metrics}
        names = {
            f"kvsidecar.cache.{name}" for name in (*GAUGES, *COUNTERS, "durable_failing", "remote_failing", "calls")
        }
        assert {name for name in metrics if not name.startswith("kvsidecar.engine.")} == names
        assert [p.value for p in metrics["kvsidecar.cache.tokens"].data.data_points] == [4]
        assert [p.value for p in metrics["kvsidecar.cache.commits"].data.data_points] == [1]
        calls = {p.attributes["rpc.method"]: p.value for p in metrics["kvsidecar.cache.calls"].data.data_points}
        assert calls == {"Stats": 1}


async def test_reuse_by_engine_is_sent_with_its_labels(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        session, counted = t.bench.session, t.reuse
        session.shares_memory = True
        counted.attach(session, "vllm")
        counted.add_stored(session, b"", 4, 100)
        counted.add_miss(session.namespace, b"", "evicted", 3)
        data = await asyncio.to_thread(t.reader.get_metrics_data)
        points = {
            m.name.removeprefix("kvsidecar.engine."): [(dict(p.attributes), p.value) for p in m.data.data_points]
            for resource in data.resource_metrics for scope in resource.scope_metrics for m in scope.metrics
        }  # fmt: skip
        labels = {"engine": "vllm", "namespace": session.namespace.hex()[:12], "tenant": ""}
        for name in COUNTERS_OF_REUSE:
            assert points[name] == [(labels, {"stored_tokens": 4, "stored_bytes": 100}.get(name, 0))]
        assert points["misses"] == [(labels | {"kind": "evicted"}, 1)]
        assert points["miss_tokens"] == [(labels | {"kind": "evicted"}, 3)]


def test_a_daemon_sends_to_a_collector(start: Callable[..., Node]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    port = free_port()
    collector = Collector(port)
    try:
        node = start(otlp_endpoint=f"http://127.0.0.1:{port}")
        peer = Peer(node)
        peer.put(FIRST)
        peer.close()
        node.kill("daemon", 15)
        resource = collector.metrics.get(timeout=10).resource_metrics[0].resource
        assert {a.key: a.value.string_value for a in resource.attributes}["service.name"] == "kvsidecar-cache"
        names = {span.name for span in collector.sent()}
        assert {"kvsidecar.cache.v1.CacheService/Commit", "copy"} <= names
    finally:
        collector.close()


def test_an_absent_collector_costs_neither_calls_nor_a_slow_end(start: Callable[..., Node]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    node = start(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    peer = Peer(node)
    peer.put(FIRST)
    assert peer.read(FIRST) == len(FIRST)
    peer.close()
    began = time.monotonic()
    node.kill("daemon", 15)
    assert time.monotonic() - began < 8, "the exporters' own patience is longer"


def test_an_endpoint_without_a_scheme_is_refused(tmp_path: Path) -> None:
    result = daemon_that_ends(tmp_path, "--otlp-endpoint", "localhost:4317")
    assert result.returncode == 2
    assert "must begin with http://" in result.stderr


def test_telemetry_is_off_unless_an_endpoint_is_set() -> None:
    assert not is_enabled("", {})
    assert is_enabled("http://there:4317", {})
    assert is_enabled("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:4317"})
    assert not is_enabled("http://there:4317", {"OTEL_SDK_DISABLED": "true"})


def test_a_daemon_that_does_not_trace_does_not_load_opentelemetry() -> None:
    code = "import sys, cache_daemon.server; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_worker_names_its_span_where_it_has_one(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider

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
        call = SessionChannel(channel).unary_unary("/S/Hear")
        call(b"")
        with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("request") as span:
            call(b"")
            future = call.future(b"")
            future.result()
            expected = f"00-{span.get_span_context().trace_id:032x}-{span.get_span_context().span_id:016x}"
    server.stop(None).wait()
    assert seen == [[], [expected], [expected]]
