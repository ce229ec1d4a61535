"""Sessions that share no memory: what they may hold, and payloads that come as they should not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import new_header
from kvsidecar.errors import UnknownLease
from kvsidecar.kv_transfer.chunk_writer import write
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from cache_daemon.rpc.request_validation import MESSAGE_BYTES
from tests.cache_daemon.conftest import GEOMETRY, Peer, code_of, descriptor, payload_of
from tests.cache_daemon.store.test_chunk_store import SLOT
from tests.cache_daemon.stores import opened

IDS = list(range(100))


@pytest.fixture
def node(start: Callable[..., Node], tmp_path: Path) -> Node:
    tmp_path.chmod(0o700)
    return start(heartbeat_ms=300, shared_socket=tmp_path / "shared.sock")


@pytest.fixture
def guest(node: Node, tmp_path: Path) -> Iterator[Session]:
    link = DaemonConnection(ServiceAddress(tmp_path / "shared.sock"), "guest", descriptor())
    assert link.wait(10)
    session = link.session
    assert session is not None
    yield session
    link.close()


def reserved(session: Session, ids: list[int]) -> pb.Reservation:
    request = pb.ReserveRequest(session_id=session.id, headers=[new_header(GEOMETRY, ids, 0)])
    found: pb.Reservation = session.stub.Reserve(request, timeout=10).reservations[0]
    assert found.outcome == pb.RESERVE_OUTCOME_GRANTED
    return found


def committed(session: Session, reservation: pb.Reservation, checksum: int) -> int:
    item = pb.CommitItem(reservation_id=reservation.reservation_id, checksum=checksum)
    request = pb.CommitRequest(session_id=session.id, epoch=session.epoch, items=[item])
    return int(session.stub.Commit(request, timeout=10).outcomes[0])


def test_payloads_that_are_not_what_was_reserved_are_refused_by_name(node: Node, guest: Session) -> None:
    room = reserved(guest, IDS)
    size, begin = room.staging.size_bytes, pb.FillRequest(session_id=guest.id)
    mine = pb.FillRequest(reservation_id=room.reservation_id)

    def filled(*messages: pb.FillRequest) -> tuple[grpc.StatusCode, str]:
        return code_of(lambda: guest.stub.Fill(iter(messages), timeout=10))

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert filled() == (invalid, "the first message of Fill must be session_id")
    assert filled(mine) == (invalid, "the first message of Fill must be session_id")
    assert filled(begin, pb.FillRequest(data=b"x"))[0] == invalid
    assert filled(begin, mine, pb.FillRequest(data=bytes(size + 1)))[0] == invalid
    code, text = filled(begin, mine, pb.FillRequest(data=b"x"))
    assert (code, text) == (invalid, f"1 payload bytes were sent, the header announced {size}")
    assert filled(begin, mine, mine)[0] == invalid, "the one before is not complete"
    assert "data message" in filled(begin, mine, pb.FillRequest(data=bytes(MESSAGE_BYTES + 1)))[1]
    assert filled(begin, pb.FillRequest(reservation_id=b"?" * 16))[0] == grpc.StatusCode.PERMISSION_DENIED
    assert filled(pb.FillRequest(session_id=b"?" * 16))[0] == grpc.StatusCode.UNAUTHENTICATED
    assert committed(guest, room, 1) == pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH
    assert filled(begin, mine)[0] == grpc.StatusCode.PERMISSION_DENIED, "the reservation has ended"


def test_a_session_that_maps_its_memory_may_be_sent_bytes_as_well(peer: Peer) -> None:
    """Other languages need no mmap."""
    room = peer.reserve(peer.header(IDS))[0]
    data = payload_of(IDS, room.staging.size_bytes)
    messages = [
        pb.FillRequest(session_id=peer.session),
        pb.FillRequest(reservation_id=room.reservation_id),
        pb.FillRequest(data=data[:10]),
        pb.FillRequest(data=data[10:]),
    ]
    assert peer.stub.Fill(iter(messages), timeout=10).filled == 1
    assert peer.commit(room).committed == 1
    assert peer.read(IDS) == len(IDS)


def test_a_chunk_that_a_longer_one_replaces_is_sent_while_it_is_leased(node: Node, guest: Session) -> None:
    peer = Peer(node)
    short = peer.put(IDS[:50])
    found = guest.stub.Match(pb.MatchRequest(session_id=guest.id, token_ids=IDS), timeout=10)
    peer.put(IDS)
    [payload] = [bytes(p) for p in guest.read(found.lease_id, found.matches, 10.0)]  # type: ignore[arg-type]
    assert payload == payload_of(IDS[:50], len(payload))
    assert found.matches[0].prefix_hash == short
    peer.close()


def test_guests_together_reserve_no_more_than_one_session_has(start: Callable[..., Node], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    node = start(shared_socket=tmp_path / "shared.sock", staging_bytes="1MiB", arena_bytes="8MiB")
    links = [DaemonConnection(ServiceAddress(tmp_path / "shared.sock"), f"guest-{i}", descriptor()) for i in range(2)]
    try:
        sessions = [link.session for link in links if link.wait(10)]
        outcomes = []
        for i, session in enumerate(sessions * 2):
            assert session is not None
            header = new_header(GEOMETRY, [i, *range(4000)], 0)
            request = pb.ReserveRequest(session_id=session.id, headers=[header])
            outcomes.append(session.stub.Reserve(request, timeout=10).reservations[0].outcome)
        granted = outcomes.count(pb.RESERVE_OUTCOME_GRANTED)
        assert granted == (1 << 20) // (-(-header.payload_bytes // 4096) * 4096)
        assert set(outcomes[granted:]) == {pb.RESERVE_OUTCOME_STAGING_FULL}
        peer = Peer(node)
        assert peer.put(IDS), "who maps its memory has its own"
        links[0].close()
        links[1].close()
        until(lambda: peer.stats().sessions == 1)
        peer.close()
        again = DaemonConnection(ServiceAddress(tmp_path / "shared.sock"), "again", descriptor())
        links.append(again)
        assert again.wait(10)
        session = again.session
        assert session is not None
        written = write(session, b"", [new_header(GEOMETRY, IDS[:9], 0)], lambda _, p: None, 10.0)
        assert written.stored == (True,), "what they held is free"
    finally:
        for link in links:
            link.close()


async def test_a_lease_ends_by_itself_where_no_memory_is_shared() -> None:
    async with opened(arena_bytes=8 * SLOT) as bench:
        described = descriptor()
        there = bench.store.open_session("t", described, keys.namespace_id(described), shares_memory=False, owner="t")
        await bench.put([1])
        ids = keys.token_bytes([1])
        mapped = await bench.store.match(bench.session, b"", ids)
        far = await bench.store.match(there, b"", ids)
        name = [far.matches[0].chunk.key]
        assert there.leased_chunks(far.lease_id, name) == [far.matches[0].chunk]
        bench.store.sessions.expire_leases(older_than_seconds=60)
        assert far.lease_id in there.leases
        bench.store.sessions.expire_leases(older_than_seconds=-1)
        with pytest.raises(UnknownLease):
            there.leased_chunks(far.lease_id, name)
        assert mapped.lease_id in bench.session.leases
        assert far.matches[0].chunk.leases == 1
        bench.store.release(bench.session, [mapped.lease_id])
        bench.store.close_session(there)
