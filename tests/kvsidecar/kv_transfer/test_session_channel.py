"""Calls of a session whose channel was closed: by its connection, which noticed that the daemon ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import Unavailable, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session
from kvsidecar.kv_transfer.session_channel import ChannelClosed, SessionChannel
from kvsidecar.kv_transfer.stream_transport import StreamTransport
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.telemetry import tracer

from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor

_CALLS: dict[str, Callable[[Session], Any]] = {
    "match": lambda s: s.match(pb.MatchRequest(session_id=s.id), 5),
    "match_async": lambda s: s.match_async(pb.MatchRequest(session_id=s.id), 5)(),
    "reserve": lambda s: s.reserve(pb.ReserveRequest(session_id=s.id), 5),
    "commit": lambda s: s.commit([], 5),
    "store_verdict": lambda s: s.store_verdict(pb.ReuseVerdict(), 5),
    "delete": lambda s: s.stub.Delete(pb.DeleteRequest(), timeout=5),
}


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="4MiB") as running:
        yield running


@pytest.fixture(params=["untraced", "traced"])
def ended(node: Node, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Session:
    if request.param == "traced":
        pytest.importorskip(tracer.SDK)
    else:
        monkeypatch.delitem(sys.modules, tracer.SDK, raising=False)
    link = DaemonConnection(ServiceAddress(node.cache_socket), "ended", descriptor())
    assert link.wait(30)
    held = link.session
    assert held is not None
    link.close()
    return held


@pytest.mark.parametrize("name", _CALLS)
def test_a_call_after_the_end_of_the_session_fails_as_if_no_daemon_answered(ended: Session, name: str) -> None:
    """gRPC raises ValueError then, and a traced process crashed. The worker's verification ended with it."""
    with pytest.raises(grpc.RpcError) as raised:
        _CALLS[name](ended)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(from_rpc(raised.value), Unavailable)


def test_nothing_is_released_or_aborted_after_the_end_of_the_session(
    ended: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "alive", True)  # it was a moment ago
    ended.release([b"lease"])
    ended.abort([b"reservation"], wait_seconds=1)
    assert not ended._pending_calls


def test_a_transfer_over_a_closed_channel_fails_alike() -> None:
    with grpc.insecure_channel("unix:/nowhere") as inner:
        channel = SessionChannel(inner)
        transport = StreamTransport(pb.Welcome(), CacheServiceStub(channel), channel)
    with pytest.raises(ChannelClosed):
        next(transport.read(b"lease", [pb.ChunkMatch(payload_bytes=1)], 5))
    reservation = pb.Reservation(staging=pb.StagingRef(size_bytes=1))
    with pytest.raises(ChannelClosed):
        transport.write([(0, reservation)], lambda _, payload: None, 5)
