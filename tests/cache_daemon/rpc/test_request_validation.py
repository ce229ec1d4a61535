"""A request beyond any limit is refused with the limit's name."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS, MAX_CUTS
from kvsidecar.errors import from_rpc

from benchmarks.node import Node
from cache_daemon.rpc import request_validation
from tests.cache_daemon.conftest import Peer


def too_long(peer: Peer) -> ChunkHeader:
    header = peer.header([1] * MAX_CHUNK_TOKENS)
    header.token_ids.append(1)
    header.token_count += 1
    return header


def watch_all(peer: Peer) -> None:
    calls = []  # a call that nobody refers to is cancelled
    for _ in range(request_validation.MAX_WATCHERS + 1):
        calls.append(peer.stub.Watch(pb.WatchRequest()))
        next(calls[-1])


def cut(peer: Peer, cuts: list[int], tokens: int = 10, price: float = 0.0) -> None:
    request = pb.MatchRequest(session_id=peer.session, token_ids=[0] * tokens, cuts=cuts, seconds_per_token=price)
    peer.stub.Match(request)


Refused = tuple[Callable[[Peer], Any], str]


def hint(peer: Peer, *retained: tuple[int, int], group: str = "") -> pb.MatchResponse:
    """A Match with retained prefixes ``(end, seconds)``."""
    prefixes = [pb.RetainedPrefix(end=end, retain_seconds=seconds) for end, seconds in retained]
    request = pb.MatchRequest(session_id=peer.session, token_ids=range(10), retained=prefixes, group=group)
    return peer.stub.Match(request)  # type: ignore[no-any-return]


LIMITS: dict[str, Refused] = {
    "tokens": (
        lambda p: p.stub.Match(
            pb.MatchRequest(session_id=p.session, token_ids=[0] * (request_validation.MAX_TOKENS + 1))
        ),
        "the number of token_ids",
    ),
    "probes": (
        lambda p: p.stub.Match(
            pb.MatchRequest(session_id=p.session, token_ids=[0] * 5000, contents=[pb.ContentProbe(tokens=1)] * 4097)
        ),
        "the number of content probes",
    ),
    "cuts": (lambda p: cut(p, list(range(1, MAX_CUTS + 2)), MAX_CUTS + 1), "the number of cuts"),
    "cuts that fall": (lambda p: cut(p, [3, 3]), "a cut at 3 follows 3"),
    "cuts beyond the prompt": (lambda p: cut(p, [3, 11]), "a cut at 11 follows 3"),
    "a cut too far": (lambda p: cut(p, [5000], 5000), "tokens between two cuts"),
    "retained prefixes": (lambda p: hint(p, *[(n, 1) for n in range(1, 66)]), "the number of retained"),
    "the time of a retained prefix": (lambda p: hint(p, (3, 2_592_001)), "retain_seconds"),
    "group": (lambda p: hint(p, group="g" * 129), "the length of group in bytes is 129"),
    "no group": (lambda p: p.stub.ReleaseGroup(pb.ReleaseGroupRequest(namespace=p.namespace)), "group is empty"),
    "price": (lambda p: cut(p, [3], price=float("nan")), "seconds_per_token"),
    "headers": (lambda p: p.reserve(*[p.header([1])] * (request_validation.MAX_ITEMS + 1)), "the number of headers"),
    "items": (
        lambda p: p.stub.Commit(pb.CommitRequest(session_id=p.session, items=[pb.CommitItem()] * 1025)),
        "the number of items",
    ),
    "page": (lambda p: p.stub.List(pb.ListRequest(page_size=request_validation.MAX_PAGE + 1)), "page_size"),
    "salt": (lambda p: p.match([1], salt=b"x" * 257), "tenant_salt"),
    "verdict": (
        lambda p: p.stub.SetVerdict(
            pb.SetVerdictRequest(session_id=p.session, verdict=pb.ReuseVerdict(strategy="x" * 5000))
        ),
        "the length of the verdict",
    ),
    "chunk": (lambda p: p.reserve(too_long(p)), "4097 tokens"),
    "position": (lambda p: p.reserve(p.header([1], start=(1 << 31) + 1)), "start_position"),
    "message": (
        lambda p: p.stub.Store(
            iter(
                [
                    pb.StoreRequest(start=pb.StoreStart(descriptor=p.descriptor, header=p.header([1] * 4000))),
                    pb.StoreRequest(data=bytes(request_validation.MESSAGE_BYTES + 1)),
                ]
            )
        ),
        "the size of a data message",
    ),
    "leases": (lambda p: [p.match([7]) for _ in range(request_validation.MAX_LEASES + 1)], "leases of this session"),
    "reservations": (
        lambda p: [p.reserve(*[p.header([n, m]) for m in range(1024)]) for n in range(5)],
        "reservations of this session",
    ),
    "watchers": (
        watch_all,
        "open Watch calls",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_refused_by_name(limited: Peer, name: str) -> None:
    ask, named = LIMITS[name]
    with pytest.raises(grpc.RpcError) as caught:
        ask(limited)
    error = from_rpc(caught.value)
    assert named in str(error)
    assert error.reason in ("INVALID_REQUEST", "LIMIT_EXCEEDED")


@pytest.fixture
def limited(daemon: Node) -> Any:
    peer = Peer(daemon)
    peer.put([7])
    yield peer
    peer.close()


def test_sessions_are_limited(start: Callable[..., Node]) -> None:
    daemon = start(heartbeat_ms=20_000)  # none of them ends while the others come
    soft, hard = resource.prlimit(daemon.pid("daemon"), resource.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 16), "as many descriptors as its clients may want"
    peers: list[Peer] = []
    try:
        peers += [Peer(daemon) for _ in range(request_validation.MAX_SESSIONS)]
        with pytest.raises(grpc.RpcError) as caught:
            Peer(daemon)
        assert "sessions" in str(from_rpc(caught.value))
    finally:
        for peer in peers:
            peer.close()
