"""What fails inside the daemon is counted, logged, told as INTERNAL and, when it goes on, by health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.chunk_layout import new_header

from cache_daemon.config import DaemonConfig
from cache_daemon.observability.call_metrics import CallMetrics, FailureWindow
from cache_daemon.rpc import stream_rpc
from cache_daemon.server import SERVICE, serve
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.sessions import Session
from tests.cache_daemon.conftest import GEOMETRY, descriptor, payload_of

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """The daemon as it is, on this loop."""
    socket, stop = folder / "cache.sock", asyncio.Event()
    config = DaemonConfig(socket=socket, store=None, arena_bytes=4 << 20)
    running = asyncio.create_task(serve(config, stop))
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await channel.channel_ready()
        yield channel
    stop.set()
    await running


async def becomes(channel: grpc.aio.Channel, service: str, status: int) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(60):
        while (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_calls_that_fail_inside_turn_health_to_not_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("listed twice")

    async with serving(tmp_path) as channel:
        stub: Any = CacheServiceStub(channel)
        asked = pb.MatchRequest(namespace=bytes(32), token_ids=[1])
        await stub.Match(asked)
        await becomes(channel, "", SERVING)
        with monkeypatch.context() as planted, structlog.testing.capture_logs() as lines:
            planted.setattr(ChunkStore, "probe", broken)
            for _ in range(10):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Match(asked)
                assert caught.value.code() is grpc.StatusCode.INTERNAL
            await becomes(channel, "", NOT_SERVING)
            await becomes(channel, SERVICE, NOT_SERVING)
        assert any("10 of 11 calls of Match" in str(line.get("why")) for line in lines)
        await asyncio.gather(*(stub.Match(asked) for _ in range(12)))
        await becomes(channel, "", SERVING)


async def test_an_unexpected_error_of_attach_is_internal_logged_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[CallMetrics] = []
    first = CallMetrics.__init__

    def noted(calls: CallMetrics, *given: Any) -> None:
        counted.append(calls)
        first(calls, *given)

    def broken(*_: object) -> Any:
        raise ValueError("a secret of the store")

    monkeypatch.setattr(CallMetrics, "__init__", noted)
    async with serving(tmp_path) as channel:
        stub: Any = CacheServiceStub(channel)
        monkeypatch.setattr(Session, "record_heartbeat", broken)
        described = descriptor()
        hello = pb.Hello(protocol_version=2, descriptor=described, namespace=keys.namespace_id(described))
        said = [pb.AttachRequest(hello=hello), pb.AttachRequest(heartbeat=pb.Heartbeat())]
        with structlog.testing.capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Attach(iter(said)):
                pass
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
        assert [line["method"] for line in lines if line["event"] == "a call failed"] == ["Attach"]
        assert counted[0].totals["Attach", "INTERNAL"] == 1


async def test_a_write_that_grpc_refuses_after_a_cancel_is_no_failure_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC raises its own InternalError in a handler that writes to a call whose client has just cancelled it."""

    async def refused(*_: object) -> Any:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")

    async with serving(tmp_path) as channel:
        stub: Any = CacheServiceStub(channel)
        described, ids = descriptor(), list(range(32))
        header = new_header(GEOMETRY, ids, 0)
        data = payload_of(ids, header.payload_bytes)
        header.checksum = keys.checksum(data)
        start = pb.StoreStart(descriptor=described, header=header)
        stored = await stub.Store(iter([pb.StoreRequest(start=start), pb.StoreRequest(data=data)]))
        monkeypatch.setattr(stream_rpc, "_written", refused)
        with structlog.testing.capture_logs() as lines:
            for _ in range(12):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Fetch(
                        pb.FetchRequest(namespace=keys.namespace_id(described), prefix_hash=stored.prefix_hash)
                    ).read()
            await becomes(channel, "", SERVING)
        assert [line for line in lines if line["event"] == "a call failed"] == []


def test_few_failures_and_failures_among_many_calls_are_no_outage() -> None:
    now = [1000.0]
    outcomes = FailureWindow(lambda: now[0])
    for _ in range(9):
        outcomes.note("Match", internal=True)
    assert outcomes.failing is None, "nine say little"
    outcomes.note("Match", internal=True)
    assert outcomes.failing == ("10 of 10 calls of Match in the last minute ended INTERNAL", 1000.0)
    now[0] += 5
    assert outcomes.failing is not None
    assert outcomes.failing[1] == 1000.0, "since when it first was so"
    for _ in range(1000):
        outcomes.note("Release", internal=False)
    assert outcomes.failing is not None, "the other methods' success is no help to who matches"
    for _ in range(11):
        outcomes.note("Match", internal=False)
    assert outcomes.failing is None
    now[0] += 61
    outcomes.note("List", internal=True)
    assert outcomes.failing is None


def test_a_cancelled_call_is_counted_as_cancelled() -> None:
    metrics = CallMetrics()
    metrics.note("Match", 0.1, asyncio.CancelledError())
    assert dict(metrics.totals) == {("Match", "CANCELLED"): 1}
