"""One caller at the shared socket cannot stop or starve a real daemon."""

from __future__ import annotations

import queue
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry, new_header

from benchmarks.condition_wait import until
from benchmarks.node import Node, free_port
from cache_daemon.rpc import request_validation
from tests.cache_daemon.conftest import Peer, code_of, descriptor

MEBIBYTE = 1 << 20
WIDE = Geometry(16, 4, 128, DATA_TYPE_FLOAT32, 16)  # 64 KiB a token


class Guest:
    """A caller at the shared socket, and its open calls."""

    def __init__(self, socket: Path) -> None:
        self.channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 * MEBIBYTE)],
        )
        self.stub: Any = CacheServiceStub(self.channel)
        self._open: list[queue.SimpleQueue[Any]] = []
        self._calls: list[Any] = []
        self.descriptor = descriptor("guest", WIDE)

    def raw(self, method: str, body: bytes) -> bytes:
        path = f"/kvsidecar.cache.v1.CacheService/{method}"
        return bytes(self.channel.unary_unary(path, None, None)(body, timeout=30))

    def attach(self, name: str = "guest") -> tuple[Any, queue.SimpleQueue[Any]]:
        """Open a session; return its stream, and the queue of messages to send."""
        return self.welcomed(name)[1:]

    def welcomed(self, name: str = "guest") -> tuple[pb.Welcome, Any, queue.SimpleQueue[Any]]:
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open.append(said)
        hello = pb.Hello(
            protocol_version=2,
            client_name=name,
            descriptor=self.descriptor,
            namespace=keys.namespace_id(self.descriptor),
        )
        said.put(pb.AttachRequest(hello=hello))
        call = self.stub.Attach(iter(said.get, None))
        self._calls.append(call)  # one that nobody refers to is cancelled
        return next(call).welcome, call, said

    def begin_store(self, number: int, tokens: int, sent: int = 0) -> Any:
        """Begin a Store call, send ``sent`` MiB, and leave the call open."""
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open.append(said)
        header = new_header(WIDE, [number * 1000 + n for n in range(tokens)], 0)
        said.put(pb.StoreRequest(start=pb.StoreStart(descriptor=self.descriptor, tenant_salt=b"g", header=header)))
        for _ in range(sent):
            said.put(pb.StoreRequest(data=bytes(MEBIBYTE)))
        return self.stub.Store.future(iter(said.get, None))

    def begin_silent(self, method: str) -> Any:
        """Begin a call that sends nothing, and leave it open."""
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open.append(said)
        multi = getattr(self.stub, method)
        self._calls.append(getattr(multi, "future", multi)(iter(said.get, None)))
        return self._calls[-1]

    def close(self) -> None:
        for said in self._open:
            said.put(None)
        self.channel.close()


@pytest.fixture
def node(start: Callable[..., Node], tmp_path: Path) -> Node:
    return start(shared_socket=tmp_path / "shared.sock", staging_bytes="4MiB", heartbeat_ms=20_000)


@pytest.fixture
def guest(node: Node, tmp_path: Path) -> Iterator[Guest]:
    found = Guest(tmp_path / "shared.sock")
    yield found
    found.close()


@pytest.fixture
def worker(node: Node) -> Iterator[Peer]:
    found = Peer(node)
    yield found
    found.close()


def rss(node: Node) -> int:
    return int(psutil.Process(node.pid("daemon")).memory_info().rss)


def staging_rss(node: Node) -> int:
    """Return the resident bytes of the daemon's staging memories."""
    maps = psutil.Process(node.pid("daemon")).memory_maps(grouped=False)
    return sum(each.rss for each in maps if each.path.startswith("/memfd:kvsidecar-staging"))


@pytest.mark.parametrize("method", ["Match", "Reserve", "Commit"])
def test_a_message_of_empty_members_takes_no_memory_and_no_time(node: Node, guest: Guest, method: str) -> None:
    member = {"Match": b"\x2a\x00", "Reserve": b"\x1a\x00", "Commit": b"\x1a\x00"}[method]
    before = rss(node)
    code, why = code_of(lambda: guest.raw(method, member * (3 * MEBIBYTE - 8)))
    assert (code, "at most" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, why = code_of(lambda: guest.raw(method, member * (8 * MEBIBYTE - 8)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "the door takes no message of that length"
    assert rss(node) - before < 64 * MEBIBYTE


def test_heartbeats_that_fall_end_their_session(worker: Peer) -> None:
    beat = pb.Heartbeat(skipped_matches=2, skipped_tokens=1 << 40, prompts=1)
    worker._out.put(pb.AttachRequest(heartbeat=beat))
    next(worker.call)
    assert worker.stats().requested_tokens == 1 << 40
    worker._out.put(pb.AttachRequest(heartbeat=pb.Heartbeat(skipped_matches=2, skipped_tokens=(1 << 40) - 1)))
    code, why = code_of(lambda: [next(worker.call) for _ in range(100)])
    assert (code, "skipped_tokens fell" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_what_a_guest_says_it_served_is_not_believed(worker: Peer, guest: Guest) -> None:
    call, said = guest.attach()
    said.put(pb.AttachRequest(heartbeat=pb.Heartbeat(skipped_matches=9, prompts=9, cached_tokens=1 << 48)))
    next(call)
    found = worker.stats()
    assert (found.matches, found.prompts, found.cached_tokens) == (0, 0, 0)


def test_store_calls_of_one_guest_share_one_staging(node: Node, guest: Guest) -> None:
    before = staging_rss(node)
    calls = [guest.begin_store(n, tokens=60, sent=3) for n in range(6)]  # 3.75 MiB each
    until(lambda: sum(call.done() for call in calls) >= 5)
    codes = {call.exception().code() for call in calls if call.done()}
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    until(lambda: staging_rss(node) > before)
    assert staging_rss(node) - before < 6 * MEBIBYTE


def test_idle_store_calls_of_guests_keep_no_worker_out(worker: Peer, guest: Guest) -> None:
    held = [guest.begin_store(n, tokens=1) for n in range(request_validation.MAX_CALLER_STREAMS + 4)]
    until(lambda: sum(call.done() for call in held) >= 4)
    assert {call.exception().code() for call in held if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    mine = [pb.StoreRequest(start=pb.StoreStart(descriptor=worker.descriptor, header=worker.header([1])))]
    code, why = code_of(lambda: worker.stub.Store(iter(mine), timeout=10))
    assert (code, "0 payload bytes were sent" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True), "it was let in"


@pytest.mark.parametrize(
    ("method", "most"),
    [(call, request_validation.MAX_CALLER_STREAMS) for call in ("Store", "Fill")]
    + [("Attach", request_validation.MAX_CALLER_SESSIONS)],
)
def test_calls_that_send_nothing_count(guest: Guest, method: str, most: int) -> None:
    calls = [guest.begin_silent(method) for _ in range(most + 4)]
    until(lambda: sum(call.done() for call in calls) >= 4)
    assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_sessions_of_one_guest_leave_room_for_other_callers(node: Node, guest: Guest, tmp_path: Path) -> None:
    for _ in range(request_validation.MAX_CALLER_SESSIONS):
        guest.attach()
    again = Guest(tmp_path / "shared.sock")  # calls beyond a connection's limit wait
    code, why = code_of(again.attach)
    again.close()
    assert (code, "of this caller" in why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    Peer(node).close()


def test_a_name_that_a_terminal_would_obey_is_refused(guest: Guest) -> None:
    code, why = code_of(lambda: guest.attach("\x1b]0;owned\x07"))
    assert (code, "printable" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert "\x1b" not in why


def test_guests_are_not_told_where_chunks_lie(worker: Peer, guest: Guest) -> None:
    for n in range(3):
        worker.put([n] * 16)
    prompt = [2] * 16 + [5]
    assert worker.match(prompt).matches[0].offset > 0
    guest.descriptor = worker.descriptor
    welcome, _, _ = guest.welcomed()
    request = pb.MatchRequest(session_id=welcome.session_id, token_ids=prompt)
    for asked in (prompt, [2] * 9):
        request.token_ids[:] = asked
        found = guest.stub.Match(request, timeout=10)
        assert found.matched_tokens == min(len(asked), 16)
        assert [m.offset for m in found.matches] == [0]
    request.token_ids[:] = [7] + [2] * 16
    request.contents.add(start=1, tokens=16)
    found = guest.stub.Match(request, timeout=10)
    assert [m.match.offset for m in found.contents] == [0]


def test_silent_connections_to_the_metrics_port_hold_few_threads(start: Callable[..., Node]) -> None:
    port = free_port()
    daemon = start(metrics_port=port)
    process = psutil.Process(daemon.pid("daemon"))
    before = process.num_threads()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(60)]
    try:
        body = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        assert b"kvsidecar_cache_uptime_seconds" in body
        until(lambda: process.num_threads() - before <= 18)
    finally:
        for one in silent:
            one.close()


def pin(stub: Any, namespace: bytes, prefix_hash: bytes) -> None:
    prefix = pb.PrefixRef(namespace=namespace, prefix_hash=prefix_hash)
    assert stub.Pin(pb.PinRequest(prefix=prefix), timeout=10).chunks == 1


def test_a_gateway_names_the_client_whose_share_of_the_pins_counts(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start(arena_bytes="4MiB", store_bytes="16MiB", shared_socket=tmp_path / "shared.sock")
    guest, gateway = Guest(tmp_path / "shared.sock"), Peer(node, "guest", geometry=WIDE)
    hashes = [gateway.put([n] * 4) for n in range(12)]  # 256 KiB each
    node.settle()

    def request(n: int, caller: str) -> pb.PinRequest:
        prefix = pb.PrefixRef(namespace=gateway.namespace, prefix_hash=hashes[n])
        return pb.PinRequest(prefix=prefix, caller=caller)

    for n in range(8):
        gateway.stub.Pin(request(n, "a client"), timeout=10)
    code, why = code_of(lambda: gateway.stub.Pin(request(8, "a client"), timeout=10))
    assert (code, "this caller may pin 2.0 MiB" in why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    gateway.stub.Pin(request(8, "another client"), timeout=10)
    gateway.stub.Unpin(pb.UnpinRequest(prefix=request(0, "").prefix, caller="a client"), timeout=10)
    gateway.stub.Pin(request(9, "a client"), timeout=10)
    for stub, caller in ((guest.stub, "a client"), (gateway.stub, "c" * 129)):
        code, why = code_of(lambda stub=stub, caller=caller: stub.Pin(request(10, caller), timeout=10))  # type: ignore[misc]
        assert (code, "caller" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    guest.close()
    gateway.close()


def test_pins_and_leases_of_one_guest_leave_the_cache_to_others(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start(arena_bytes="4MiB", store_bytes="16MiB", shared_socket=tmp_path / "shared.sock")
    guest, worker = Guest(tmp_path / "shared.sock"), Peer(node, "guest", geometry=WIDE)
    texts = [[n] * 4 for n in range(12)]  # 256 KiB each
    hashes = [worker.put(ids) for ids in texts]
    node.settle()
    for prefix_hash in hashes[:8]:
        pin(guest.stub, worker.namespace, prefix_hash)
    code, why = code_of(lambda: pin(guest.stub, worker.namespace, hashes[8]))
    assert (code, "this caller may pin 2.0 MiB" in why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    for prefix_hash in hashes[8:]:
        pin(worker.stub, worker.namespace, prefix_hash)
    welcome, _, _ = guest.welcomed()
    requests = [pb.MatchRequest(session_id=welcome.session_id, token_ids=ids) for ids in texts]
    found = [guest.stub.Match(request, timeout=10).matched_tokens for request in requests]
    assert sum(found) == 4 * 4, "a quarter of the arena"
    for n in range(100, 112):
        worker.put([n] * 4)
        found_again = worker.match([n] * 4)
        assert found_again.matched_tokens == 4
        worker.release(found_again)
    guest.close()
    worker.close()
    node.restart_daemon()
    guest, worker = Guest(tmp_path / "shared.sock"), Peer(node, "guest", geometry=WIDE)
    assert worker.stats().pinned_bytes == 3 * MEBIBYTE
    new = worker.put([200] * 4)
    code, why = code_of(lambda: pin(guest.stub, worker.namespace, new))
    assert (code, "this caller may pin" in why) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True), "its pins still count"
    guest.close()
    worker.close()
