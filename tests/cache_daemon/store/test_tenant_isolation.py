"""Isolation of tenants of a real daemon, at each listener."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.net.channel import channel

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.condition_wait import until
from benchmarks.node import Node, free_port
from tests import seeds
from tests.cache_daemon.conftest import Peer, code_of, descriptor, payload_of

COMMITTED, PERSISTED = pb.EVENT_TYPE_COMMITTED, pb.EVENT_TYPE_PERSISTED
NAMESPACE = keys.namespace_id(descriptor())
IDS = list(range(300))


def pieces(peer: Peer, ids: list[int], salt: bytes) -> Iterator[pb.StoreRequest]:
    header = peer.header(ids)
    data = payload_of(ids, header.payload_bytes)
    header.checksum = keys.checksum(data)
    yield pb.StoreRequest(start=pb.StoreStart(descriptor=descriptor(), tenant_salt=salt, header=header))
    yield pb.StoreRequest(data=data)


def fetched(stub: Any, key: bytes, salt: bytes) -> bytes:
    request = pb.FetchRequest(namespace=NAMESPACE, tenant_salt=salt, prefix_hash=key)
    return b"".join(part.data for part in stub.Fetch(request))


@pytest.fixture
def node(start: Callable[..., Node], tmp_path: Path) -> Node:
    """Run a daemon with TLS and two tenants that have tokens, one of them with a certificate as well."""
    authority = CertificateAuthority(tmp_path)
    server = authority.issue("server", hosts=("localhost",))
    table = tmp_path / "tenants.toml"
    table.write_text(
        "".join(
            f'[tenant.{name}]\nsalt = "{name}"\ntokens = ["sha256:{hashlib.sha256(name.encode() * 4).hexdigest()}"]\n'
            for name in ("alice", "bob")
        )
    )
    table.chmod(0o600)
    shared = tmp_path / "shared.sock"
    tmp_path.chmod(0o700)
    port = free_port()
    node = start(
        heartbeat_ms=500, tcp=f"localhost:{port}", tls_cert=server.certificate, tls_key=server.key, tenants=table,
        shared_socket=shared,
    )  # fmt: skip
    node.shared, node.port, node.authority = shared, port, authority  # type: ignore[attr-defined]
    return node


def by_token(node: Any, name: str) -> grpc.Channel:
    return channel(f"localhost:{node.port}", token=name * 4, ca=node.authority.ca)


def test_over_tcp_a_tenant_stores_matches_and_fetches_its_own(node: Node) -> None:
    peer = Peer(node)
    with by_token(node, "alice") as door:
        alice: Any = CacheServiceStub(door)
        stored = alice.Store(pieces(peer, IDS, b"alice"))
        request = pb.MatchRequest(namespace=NAMESPACE, tenant_salt=b"alice", token_ids=IDS)
        assert alice.Match(request).matched_tokens == len(IDS)
        whole = fetched(alice, stored.prefix_hash, b"alice")
        assert whole == payload_of(IDS, len(whole))
        listed = alice.List(pb.ListRequest(namespace=NAMESPACE, tenant_salt=b"alice")).chunks
        assert [c.prefix_hash for c in listed] == [stored.prefix_hash]
    peer.close()


def test_a_token_of_one_tenant_sees_nothing_of_another(node: Node) -> None:
    peer = Peer(node)
    key = peer.put(IDS, salt=b"alice")
    with by_token(node, "bob") as door:
        bob: Any = CacheServiceStub(door)
        mine = {"namespace": NAMESPACE, "tenant_salt": b"bob"}
        theirs = {"namespace": NAMESPACE, "tenant_salt": b"alice"}
        for call in (
            lambda: bob.Match(pb.MatchRequest(token_ids=IDS, **theirs)),
            lambda: fetched(bob, key, b"alice"),
            lambda: bob.List(pb.ListRequest(**theirs)),
            lambda: bob.Pin(pb.PinRequest(prefix=pb.PrefixRef(prefix_hash=key, **theirs))),
            lambda: bob.Delete(pb.DeleteRequest(prefix=pb.PrefixRef(**theirs))),
            lambda: bob.ReleaseGroup(pb.ReleaseGroupRequest(group="agent", **theirs)),
            lambda: bob.Stats(pb.StatsRequest(**theirs)),
            lambda: list(bob.Watch(pb.WatchRequest(**theirs))),
            lambda: bob.Store(pieces(peer, [9, 9], b"alice")),
            lambda: bob.Match(pb.MatchRequest(token_ids=IDS, namespace=NAMESPACE)),
        ):
            code, text = code_of(call)
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert "alice" not in text.replace("may not use", "")
        assert bob.Match(pb.MatchRequest(token_ids=IDS, **mine)).matched_tokens == 0
        assert code_of(lambda: fetched(bob, key, b"bob"))[0] == grpc.StatusCode.NOT_FOUND
        assert not bob.List(pb.ListRequest(**mine)).chunks
        assert bob.Stats(pb.StatsRequest(**mine)).chunks == 0
    assert peer.read(IDS, salt=b"alice") == len(IDS)
    peer.close()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"alice"', '"carol"', grpc.StatusCode.PERMISSION_DENIED),
        ('"sha256:', f'"sha256:{"0" * 64}", "sha256:', None),
        (hashlib.sha256(b"alice" * 4).hexdigest(), "0" * 64, grpc.StatusCode.UNAUTHENTICATED),
    ],
    ids=["another salt", "one token more", "revoked token"],
)
def test_a_reload_that_changes_a_callers_rights_ends_its_watch(
    node: Any, tmp_path: Path, old: str, new: str, expected: grpc.StatusCode | None
) -> None:
    """Watch authenticated once, so a revoked token received token ids until its client hung up."""
    peer, table = Peer(node), tmp_path / "tenants.toml"
    with by_token(node, "alice") as door, by_token(node, "bob") as other:
        alice: Any = CacheServiceStub(door)
        bob: Any = CacheServiceStub(other)
        watch = alice.Watch(pb.WatchRequest(namespace=NAMESPACE, tenant_salt=b"alice", with_tokens=True), timeout=60)
        next(watch)
        peer.put([1, 2], salt=b"alice")
        events = [next(watch), next(watch)]
        assert [(e.type, list(e.chunk.token_ids)) for e in events] == [(t, [1, 2]) for t in (COMMITTED, PERSISTED)]
        table.write_text(table.read_text().replace(old, new, 1).replace('"bob"', '"reloaded"'))
        node._processes["a-daemon"].send_signal(signal.SIGHUP)
        request = pb.MatchRequest(namespace=NAMESPACE, tenant_salt=b"bob", token_ids=[1])
        until(lambda: code_of(lambda: bob.Match(request))[0] is grpc.StatusCode.PERMISSION_DENIED)
        peer.put([3, 4], salt=b"alice")
        if expected is None:
            assert list(next(watch).chunk.token_ids) == [3, 4], "the rights are the same"
            watch.cancel()
        else:
            assert code_of(lambda: next(watch))[0] is expected
    peer.close()


def test_without_a_token_or_with_a_wrong_one_nothing_is_answered(node: Any) -> None:
    for token in (None, "mallory"):
        with channel(f"localhost:{node.port}", token=token, ca=node.authority.ca) as door:
            stub: Any = CacheServiceStub(door)
            code, _ = code_of(lambda stub=stub: stub.Match(pb.MatchRequest(namespace=NAMESPACE, token_ids=IDS)))
            assert code == grpc.StatusCode.UNAUTHENTICATED


def test_a_guest_sees_what_its_salts_open_and_nothing_else(node: Any) -> None:
    peer = Peer(node)
    key = peer.put(IDS, salt=b"secret")
    root = keys.tenant_root(NAMESPACE, b"secret")
    with channel(node.shared) as door:
        guest: Any = CacheServiceStub(door)
        for operators_only in (
            lambda: guest.List(pb.ListRequest()),
            lambda: guest.Stats(pb.StatsRequest()),
            lambda: list(guest.Watch(pb.WatchRequest())),
            lambda: guest.Delete(pb.DeleteRequest()),
            lambda: list(guest.Carry(pb.CarryRequest(namespace=NAMESPACE, tenant_salt=b"secret", direction=1))),
            lambda: guest.Delete(pb.DeleteRequest(prefix=pb.PrefixRef(root=root))),
            lambda: guest.Pin(pb.PinRequest(prefix=pb.PrefixRef(root=root, prefix_hash=key))),
            lambda: list(guest.Fetch(pb.FetchRequest(root=root, prefix_hash=key))),
        ):
            assert code_of(operators_only)[0] == grpc.StatusCode.PERMISSION_DENIED
        # A root is no namespace: with it, an empty salt once opened every tenant.
        for namespace, salt in ((root, b""), (NAMESPACE, b""), (NAMESPACE, b"guess")):
            request = pb.FetchRequest(namespace=namespace, tenant_salt=salt, prefix_hash=key)
            assert code_of(lambda request=request: list(guest.Fetch(request)))[0] == grpc.StatusCode.NOT_FOUND
            assert not guest.List(pb.ListRequest(namespace=namespace, tenant_salt=salt)).chunks
        assert len(fetched(guest, key, b"secret")) > 0, "whoever knows the salt may"
        watch = guest.Watch(pb.WatchRequest(namespace=NAMESPACE, tenant_salt=b"mine"))
        next(watch)
        peer.put([1, 2], salt=b"secret")
        peer.put([3, 4], salt=b"mine")
        event = next(watch)
        assert event.sequence_number == 1, "others' events leave no gaps"
        assert event.chunk.root == keys.tenant_root(NAMESPACE, b"mine")
        watch.cancel()
    peer.close()


def test_guests_share_no_memory(node: Any) -> None:
    with channel(node.shared) as door:
        stub: Any = CacheServiceStub(door)
        hello = pb.Hello(protocol_version=2, client_name="g", descriptor=descriptor(), namespace=NAMESPACE)
        call = stub.Attach(iter([pb.AttachRequest(hello=hello)]))
        welcome = next(call).welcome
        assert not welcome.memory_socket
        assert not welcome.HasField("arena")
        call.cancel()


def test_a_salt_that_spells_a_chunk_opens_nothing(peer: Peer) -> None:
    """Hashes named no purpose: the salt that has the bytes of a first chunk's tokens was that chunk's prefix hash, and
    its tenant read and wrote in the common tree."""
    first = peer.put([1, 2, 3])
    peer.put([4, 5], start=3, parent=first)
    salt = keys.token_bytes([1, 2, 3])
    assert peer.match([4, 5], salt=salt).matched_tokens == 0
    peer.put([4, 5], salt=salt)
    assert peer.match([4, 5], salt=salt).matched_tokens == 2
    assert peer.match([1, 2, 3, 4, 5]).matched_tokens == 5
    assert peer.stats().chunks == 3


# Of each block the quickest call of either kind: other processes are in the way of most, of all seldom. Which is first
# in a pair is drawn, so that without a difference either is the quicker in half of the blocks, whatever else runs.
BLOCKS, PAIRS = 100, 20
THEIRS, NOBODYS = list(range(1000, 1300)), list(range(2000, 2300))


def deviations(peer: Peer, draw: random.Random, planted_seconds: float = 0.0) -> float:
    """Return by how many standard deviations of a fair coin one kind of miss is slower in more blocks."""
    slower = 0.0

    def once(ids: list[int]) -> float:
        request = pb.MatchRequest(session_id=peer.session, token_ids=ids, tenant_salt=b"bob")
        waits_seconds = planted_seconds if ids is THEIRS else 0.0
        began = time.perf_counter()
        assert peer.stub.Match(request).matches == []
        answered = ended = time.perf_counter()
        while ended - answered < waits_seconds:
            ended = time.perf_counter()
        return ended - began

    for _ in range(BLOCKS):
        theirs, nobodys = [], []
        for _ in range(PAIRS):
            for ids in (THEIRS, NOBODYS) if draw.random() < 0.5 else (NOBODYS, THEIRS):
                (theirs if ids is THEIRS else nobodys).append(once(ids))
        slower += min(theirs) > min(nobodys)
    return (slower - BLOCKS / 2) / (BLOCKS**0.5 / 2)


def test_time_does_not_tell_what_another_tenant_has(peer: Peer) -> None:
    """A prompt that another tenant has stored takes as long to miss as one that nobody has. By chance alone, 4 standard
    deviations are seen once in 13,000 rounds, so two such rounds of one sign are a difference."""
    peer.put(THEIRS, salt=b"alice")
    draw = random.Random(seeds.chosen())
    first = deviations(peer, draw)
    if abs(first) >= 4:
        second = deviations(peer, draw)
        assert abs(second) < 4 or first * second < 0, (first, second)


def test_a_fifth_of_a_millisecond_would_tell(peer: Peer) -> None:
    """The measure itself, with so much planted: in one of some tries, for a machine may be busy for one."""
    peer.put(THEIRS, salt=b"alice")
    draw = random.Random(seeds.chosen())
    assert any(deviations(peer, draw, planted_seconds=2e-4) > 4 for _ in range(5))
