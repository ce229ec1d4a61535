"""Fetch, Store and Watch: streams that stall, break off or cannot be granted, and the end of the daemon after them."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry

from benchmarks.condition_wait import until
from benchmarks.node import Node
from cache_daemon.rpc.stream_rpc import STREAM_TIMEOUT_SECONDS
from tests.cache_daemon.conftest import Peer, code_of, payload_of


def storing(peer: Peer, ids: list[int], checksum: int | None = None) -> Iterator[pb.StoreRequest]:
    header = peer.header(ids)
    data = payload_of(ids, header.payload_bytes)
    header.checksum = keys.checksum(data) if checksum is None else checksum
    yield pb.StoreRequest(start=pb.StoreStart(descriptor=peer.descriptor, header=header))
    yield pb.StoreRequest(data=data)


def test_fetch_and_store_move_chunks_as_byte_streams(peer: Peer) -> None:
    ids = list(range(2000))
    header = peer.header(ids)
    data = payload_of(ids, header.payload_bytes)
    header.checksum = keys.checksum(data)

    def pieces(checksum_of: bytes = data) -> list[pb.StoreRequest]:
        first = pb.StoreRequest(start=pb.StoreStart(descriptor=peer.descriptor, header=header))
        cuts = range(0, len(checksum_of), 100_000)
        return [first, *(pb.StoreRequest(data=checksum_of[i : i + 100_000]) for i in cuts)]

    code, _ = code_of(lambda: peer.stub.Store(iter(pieces(b"\0" * len(data)))))
    assert code == grpc.StatusCode.DATA_LOSS
    code, text = code_of(lambda: peer.stub.Store(iter(pieces()[:-1])))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "announced" in text
    stored = peer.stub.Store(iter(pieces()))
    assert peer.stub.Store(iter(pieces())).already_stored
    got = list(peer.stub.Fetch(pb.FetchRequest(namespace=peer.namespace, prefix_hash=stored.prefix_hash)))
    assert got[0].header.prefix_hash == stored.prefix_hash
    assert b"".join(m.data for m in got[1:]) == data
    assert peer.read(ids) == 2000
    stats = peer.stats()
    assert (stats.leases, stats.reservations, stats.sessions) == (0, 0, 1)


@pytest.mark.parametrize("after", [1, 2**63])
def test_watching_from_a_number_that_was_never_given_is_refused(peer: Peer, after: int) -> None:
    """It was a loop without an await: the daemon answered nobody any more, not even SIGTERM."""
    request = pb.WatchRequest(epoch=peer.welcome.epoch, after_sequence=after)
    code, text = code_of(lambda: list(peer.stub.Watch(request, timeout=30)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert str(after) in text
    peer.put([1])
    assert peer.read([1]) == 1


def test_a_store_that_was_not_committed_is_no_success(start: Callable[..., Node]) -> None:
    peer = Peer(start(arena_bytes="1MiB", store="none"))
    held = []
    for i in range(256):
        peer.put([i])
        held.append(peer.match([i]))
    code, text = code_of(lambda: peer.stub.Store(storing(peer, [999])))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "try again later" in text
    assert peer.read([999]) == 0
    peer.close()


@pytest.mark.alone  # others may keep the disk for longer than a commit waits
def test_storing_at_full_speed_waits_for_the_disk_instead_of_failing(start: Callable[..., Node]) -> None:
    """Nothing was leased, and yet the arena was full: of chunks that were being written."""
    peer = Peer(start(arena_bytes="1MiB"))
    for i in range(600):
        assert peer.stub.Store(storing(peer, [i, i + 1])).prefix_hash
    peer.close()


@pytest.mark.parametrize("refused", ["checksum", "too much", "nothing"])
def test_sigterm_after_a_refused_store_ends_the_daemon_in_order(start: Callable[..., Node], refused: str) -> None:
    node = start()
    peer = Peer(node)
    messages = list(storing(peer, [1, 2, 3], checksum=1 if refused == "checksum" else None))
    if refused == "too much":
        messages.append(pb.StoreRequest(data=b"x"))
    if refused == "nothing":
        messages.pop()
    with pytest.raises(grpc.RpcError):
        peer.stub.Store(iter(messages))
    peer.close()
    process = node._processes["a-daemon"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    del node._processes["a-daemon"]


def test_a_stalled_store_gives_back_what_it_holds(peer: Peer) -> None:
    sending: queue.SimpleQueue[pb.StoreRequest | None] = queue.SimpleQueue()
    sending.put(next(storing(peer, [1, 2, 3])))
    began = time.monotonic()
    stalled = peer.stub.Store.future(iter(sending.get, None))
    asked = pb.MatchRequest(session_id=peer.session, token_ids=[1, 2, 3], explain=True)
    until(lambda: peer.stub.Match(asked).miss.by == "writing")  # a Reserve of ours that came before would refuse it
    assert peer.reserve(peer.header([1, 2, 3]))[0].outcome == pb.RESERVE_OUTCOME_IN_PROGRESS
    with pytest.raises(grpc.RpcError) as caught:
        stalled.result(timeout=STREAM_TIMEOUT_SECONDS + 20)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began >= STREAM_TIMEOUT_SECONDS
    sending.put(None)
    peer.put([1, 2, 3])
    assert peer.read([1, 2, 3]) == 3


def test_a_stalled_fetch_gives_back_what_it_holds(start: Callable[..., Node]) -> None:
    node = start(arena_bytes="128MiB")
    peer = Peer(node, geometry=Geometry(16, 4, 128, DATA_TYPE_FLOAT32, 16))
    keys_ = [peer.put([i, *range(1, 256)]) for i in range(4)]  # 16 MiB each, more than a connection buffers
    streams = [peer.stub.Fetch(pb.FetchRequest(namespace=peer.namespace, prefix_hash=k)) for k in keys_]

    def held() -> int:
        """Leases on all chunks; those of Fetch belong to no session, so Stats does not count them."""
        return sum(chunk.leases for chunk in peer.list_all())

    for stream in streams:
        next(stream)
    time.sleep(0.5)
    assert held() == len(streams), "each stalls"
    for stream in streams:
        stream.cancel()
    until(lambda: held() == 0)
    peer.stub.Delete(pb.DeleteRequest())
    until(lambda: peer.stats().arena_used_bytes == 0)
    peer.close()


def test_a_damaged_store_ends_no_session(start: Callable[..., Node]) -> None:
    """Heartbeats read verdicts from the store, and its damage ended every session."""
    node = start(heartbeat_ms=200, compression="none")
    peer = Peer(node)
    peer.put(list(range(300)))
    node.settle()
    file = node.folder / "store" / "data.mdb"
    with file.open("r+b") as data:
        data.seek(8192)
        data.write(b"\xff" * (file.stat().st_size - 8192))
    time.sleep(1.5)
    assert peer.read(list(range(300))) == 300
    assert peer.stats().sessions == 1
    peer.close()
