"""The daemon's protocol, over its real socket."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import from_rpc

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer, code_of, descriptor, payload_of


def test_a_stored_prefix_is_found_to_the_token(peer: Peer) -> None:
    first = peer.put([1, 2, 3, 4])
    peer.put([5, 6, 7], start=4, parent=first)
    assert peer.read([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert peer.read([1, 2, 3, 4, 5, 9]) == 5
    assert peer.read([1, 2, 9]) == 2
    assert peer.read([9]) == 0


def test_an_uncommitted_chunk_is_invisible(peer: Peer) -> None:
    reserved = peer.reserve(peer.header([1, 2]))[0]
    assert peer.read([1, 2]) == 0
    assert peer.reserve(peer.header([1, 2]))[0].outcome == pb.RESERVE_OUTCOME_IN_PROGRESS
    peer.staged(reserved.staging)[:] = payload_of([1, 2], reserved.staging.size_bytes)
    peer.commit(reserved)
    assert peer.read([1, 2]) == 2
    assert peer.reserve(peer.header([1, 2]))[0].outcome == pb.RESERVE_OUTCOME_ALREADY_STORED


def test_a_longer_sibling_supersedes_its_prefix(peer: Peer) -> None:
    peer.put([1, 2])
    peer.put([1, 2, 3, 4])
    until(lambda: peer.stats().chunks == 1)
    assert peer.read([1, 2, 9]) == 2


def test_a_leased_slot_survives_supersession_and_deletion(peer: Peer) -> None:
    peer.put([1, 2])
    held = peer.match([1, 2])
    before = bytes(peer.view(held.matches[0]))
    peer.put([1, 2, 3])
    peer.stub.Delete(pb.DeleteRequest())
    for i in range(50):  # would take the slot if it were free
        peer.put([100 + i])
    assert bytes(peer.view(held.matches[0])) == before
    used = peer.stats().arena_used_bytes
    assert peer.release(held) == 1
    until(lambda: peer.stats().arena_used_bytes < used)  # once the writer, too, is done with it


def test_release_and_abort_are_idempotent(peer: Peer) -> None:
    peer.put([1])
    held = peer.match([1])
    assert peer.release(held) == 1
    assert peer.release(held) == 0
    reserved = peer.reserve(peer.header([2]))[0]
    request = pb.AbortRequest(session_id=peer.session, reservation_ids=[reserved.reservation_id])
    assert [peer.stub.Abort(request).aborted for _ in range(2)] == [1, 0]


def test_the_end_of_a_session_frees_all_it_held(daemon: Node) -> None:
    peer, other = Peer(daemon), Peer(daemon)
    peer.put([1])
    peer.match([1])
    peer.reserve(peer.header([2]))
    assert (other.stats().leases, other.stats().reservations) == (1, 1)
    peer.close()
    until(lambda: other.stats().sessions == 1)
    assert (other.stats().leases, other.stats().reservations) == (0, 0)
    assert other.reserve(other.header([2]))[0].outcome == pb.RESERVE_OUTCOME_GRANTED
    other.close()


def test_a_session_without_heartbeats_ends(daemon: Node) -> None:
    silent, other = Peer(daemon, heartbeats=False), Peer(daemon)
    silent.put([1])
    silent.match([1])
    until(lambda: other.stats().sessions == 1)
    assert other.stats().leases == 0
    code, text = code_of(lambda: silent.match([1]))
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert "Attach" in text
    other.close()


def test_tenants_never_meet(peer: Peer) -> None:
    peer.put([1, 2, 3], salt=b"a")
    assert peer.read([1, 2, 3], salt=b"b") == 0
    assert peer.read([1, 2, 3]) == 0
    assert peer.read([1, 2, 3], salt=b"a") == 3
    key = keys.prefix_hash(keys.tenant_root(peer.namespace, b"a"), [1, 2, 3])
    request = pb.FetchRequest(namespace=peer.namespace, tenant_salt=b"b", prefix_hash=key)
    assert code_of(lambda: list(peer.stub.Fetch(request)))[0] == grpc.StatusCode.NOT_FOUND


def test_namespaces_never_meet(daemon: Node) -> None:
    one, two = Peer(daemon, "one"), Peer(daemon, "two")
    one.put([1, 2, 3])
    assert two.read([1, 2, 3]) == 0
    one.close()
    two.close()


def test_a_probe_needs_no_session_and_holds_nothing(peer: Peer) -> None:
    peer.put([1, 2])
    found = peer.stub.Match(pb.MatchRequest(namespace=peer.namespace, token_ids=[1, 2, 3]))
    assert found.matched_tokens == 2
    assert not found.lease_id
    assert peer.stats().leases == 0


def test_eviction_spares_leased_and_pinned_chunks(start: Callable[..., Node]) -> None:
    node = start(arena_bytes="1MiB", store="none", eviction="lru")
    peer = Peer(node)
    pinned = peer.put([1])
    peer.stub.Pin(pb.PinRequest(prefix=pb.PrefixRef(namespace=peer.namespace, prefix_hash=pinned)))
    peer.put([2])
    held = peer.match([2])
    for i in range(600):
        peer.put([1000 + i])
    assert peer.stats().arena_evictions > 300
    assert peer.read([1]) == 1
    assert peer.read([2]) == 1
    peer.release(held)
    peer.stub.Unpin(pb.UnpinRequest(prefix=pb.PrefixRef(namespace=peer.namespace, prefix_hash=pinned)))
    for i in range(600):
        peer.put([3000 + i])
    assert peer.read([1]) == 0
    assert peer.read([2]) == 0
    peer.close()


def test_a_full_arena_refuses_and_disturbs_nobody(start: Callable[..., Node]) -> None:
    peer = Peer(start(arena_bytes="1MiB", store="none"))
    held = []
    for i in range(256):
        peer.put([i])
        held.append(peer.match([i]))
    reserved = peer.reserve(peer.header([999]))[0]
    assert list(peer.commit(reserved).outcomes) == [pb.COMMIT_OUTCOME_ARENA_FULL]
    assert all(len(h.matches) == 1 and peer.is_right([i], h) for i, h in enumerate(held))
    peer.release(held[0])
    peer.put([999])
    peer.close()


def test_list_pages_through_everything(peer: Peer) -> None:
    for i in range(7):
        peer.put([i])
    seen, token = [], b""
    while True:
        page = peer.stub.List(pb.ListRequest(page_size=3, page_token=token))
        seen += [c.prefix_hash for c in page.chunks]
        token = page.next_page_token
        if not token:
            break
    assert len(seen) == len(set(seen)) == 7


def test_watch_resumes_where_it_stopped(peer: Peer) -> None:
    peer.put([1])
    watch = peer.stub.Watch(pb.WatchRequest(epoch=peer.welcome.epoch, after_sequence=0))
    assert next(watch).sequence_number == 0
    first = next(watch)
    assert (first.sequence_number, first.type) == (1, pb.EVENT_TYPE_COMMITTED)
    watch.cancel()
    peer.put([2])
    again = peer.stub.Watch(pb.WatchRequest(epoch=peer.welcome.epoch, after_sequence=1))
    next(again)
    numbers = [next(again).sequence_number for _ in range(2)]
    assert numbers == [2, 3]
    again.cancel()
    code, text = code_of(lambda: list(peer.stub.Watch(pb.WatchRequest(epoch=7, after_sequence=1))))
    assert code == grpc.StatusCode.OUT_OF_RANGE
    assert "List" in text


def test_tokens_are_told_to_who_asks(peer: Peer) -> None:
    first = peer.put([1, 2, 70000])
    watch = peer.stub.Watch(pb.WatchRequest(with_tokens=True))
    next(watch)
    peer.put([3], start=3, parent=first)
    second = next(event.chunk for event in watch if event.chunk.start_position == 3)
    assert second.token_ids == [3]
    watch.cancel()
    listed = peer.stub.List(pb.ListRequest(with_tokens=True)).chunks
    assert {c.start_position: list(c.token_ids) for c in listed} == {0: [1, 2, 70000], 3: [3]}
    assert not any(c.token_ids for c in peer.list_all())


def test_a_page_with_tokens_is_bounded_by_them(start: Callable[..., Node]) -> None:
    peer = Peer(start(arena_bytes="16MiB"))  # which takes all of them, whatever keeps the disk
    for n in range(17):
        peer.put([n] * 4000)
    page = peer.stub.List(pb.ListRequest(with_tokens=True))
    rest = peer.stub.List(pb.ListRequest(with_tokens=True, page_token=page.next_page_token))
    assert [len(p.chunks) for p in (page, rest)] == [16, 1]
    assert not rest.next_page_token
    peer.close()


def test_health_and_reflection_answer(daemon: Node) -> None:
    with daemon.cache_channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="kvsidecar.cache.v1.CacheService")
        assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
    mode = daemon.cache_socket.stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


# ---- bad input ----------------------------------------------------------------------------------------------


def attach(node: Node, hello: pb.Hello) -> None:
    with node.cache_channel() as channel:
        from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

        list(CacheServiceStub(channel).Attach(iter([pb.AttachRequest(hello=hello)])))


@pytest.mark.parametrize(
    ("hello", "code", "named"),
    [
        (pb.Hello(), grpc.StatusCode.INVALID_ARGUMENT, "protocol_version is 0"),
        (
            pb.Hello(protocol_version=2, newest_protocol_version=1),
            grpc.StatusCode.INVALID_ARGUMENT,
            "newest_protocol_version 1",
        ),
        (
            pb.Hello(protocol_version=2, descriptor=descriptor(), namespace=b"x" * 32),
            grpc.StatusCode.FAILED_PRECONDITION,
            "does not belong to the descriptor",
        ),
        (
            pb.Hello(
                protocol_version=2, client_name="n" * 65, descriptor=descriptor(),
                namespace=keys.namespace_id(descriptor()),
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "client_name is 65",
        ),
    ],
)  # fmt: skip
def test_a_wrong_hello_is_refused(daemon: Node, hello: pb.Hello, code: grpc.StatusCode, named: str) -> None:
    found, text = code_of(lambda: attach(daemon, hello))
    assert found == code
    assert named in text


def test_stale_epochs_forged_leases_and_wrong_checksums(peer: Peer) -> None:
    reserved = peer.reserve(peer.header([1]))[0]
    session = peer.session

    def commit(reservation_id: bytes, epoch: int, times: int = 1) -> Callable[[], pb.CommitResponse]:
        items = [pb.CommitItem(reservation_id=reservation_id, checksum=1)] * times
        return lambda: peer.stub.Commit(pb.CommitRequest(session_id=session, epoch=epoch, items=items))

    epoch = peer.welcome.epoch
    code, text = code_of(commit(reserved.reservation_id, 1))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "epoch" in text
    code, _ = code_of(commit(b"forged" * 3, epoch))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    code, text = code_of(commit(reserved.reservation_id, epoch, times=2))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "named twice" in text
    assert peer.stats().reservations == 1, "a refused Commit ends no reservation"
    assert list(commit(reserved.reservation_id, epoch)().outcomes) == [pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH]
    assert peer.read([1]) == 0
    peer.put([1])
    assert peer.read([1]) == 1


def test_another_sessions_lease_is_not_mine(daemon: Node) -> None:
    mine, other = Peer(daemon), Peer(daemon)
    reserved = mine.reserve(mine.header([1]))[0]
    items = [pb.CommitItem(reservation_id=reserved.reservation_id)]
    request = pb.CommitRequest(session_id=other.session, epoch=other.welcome.epoch, items=items)
    code, _ = code_of(lambda: other.stub.Commit(request))
    assert code == grpc.StatusCode.PERMISSION_DENIED
    mine_by_other = pb.AbortRequest(session_id=other.session, reservation_ids=[reserved.reservation_id])
    aborted = other.stub.Abort(mine_by_other)
    assert aborted.aborted == 0
    mine.close()
    other.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": 3}, "geometry"),
        ({"payload_bytes": 5}, "payload_bytes is 5"),
        ({"parent_prefix_hash": b"short"}, "parent_prefix_hash has 5 bytes"),
        ({"format_version": 1}, "format_version is 1"),
        ({"token_count": 5}, "token_count is 5"),
        ({"prefill_seconds": float("nan")}, "prefill_seconds is nan"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(peer: Peer, change: dict[str, object], named: str) -> None:
    header = peer.header([1, 2])
    for name, value in change.items():
        setattr(header, name, value)
    code, text = code_of(lambda: peer.reserve(header))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert named in text


def test_a_chunk_without_its_parent_is_not_stored(peer: Peer) -> None:
    orphan = peer.header([1], start=4, parent=b"p" * 32)
    assert peer.reserve(orphan)[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING
    parent = peer.put([1, 2])
    gap = peer.header([5], start=3, parent=parent)
    assert peer.reserve(gap)[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING


def test_malformed_protobuf_and_oversized_messages_are_refused(daemon: Node, peer: Peer) -> None:
    with daemon.cache_channel() as channel:
        raw = channel.unary_unary("/kvsidecar.cache.v1.CacheService/Match")
        code, _ = code_of(lambda: raw(b"\xff\xff\xff not protobuf", timeout=30))
        assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN)
        code, _ = code_of(lambda: raw(b"\0" * (65 << 20), timeout=30))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    peer.put([1])
    assert peer.read([1]) == 1


def test_errors_carry_a_reason(peer: Peer) -> None:
    from kvsidecar.errors import UnknownSession

    with pytest.raises(grpc.RpcError) as caught:
        peer.stub.Match(pb.MatchRequest(session_id=b"no", token_ids=[1]))
    assert isinstance(from_rpc(caught.value), UnknownSession)


def test_many_peers_at_once_keep_their_bytes(daemon: Node) -> None:
    """Writers and readers race; nobody ever sees bytes that are not the chunk's."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            peer = Peer(daemon)
            for i in range(60):
                ids = [seed % 3, i]
                reserved = peer.reserve(peer.header(ids))[0]
                if reserved.outcome == pb.RESERVE_OUTCOME_GRANTED:
                    peer.staged(reserved.staging)[:] = payload_of(ids, reserved.staging.size_bytes)
                    peer.commit(reserved)
                peer.read(ids)
                peer.read([(seed + 1) % 3, i])
            peer.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    until(lambda: daemon.cache_stats().sessions == 0)
    stats = daemon.cache_stats()
    assert (stats.leases, stats.reservations) == (0, 0)
