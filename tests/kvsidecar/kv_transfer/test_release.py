"""What the daemon leased or reserved is given back, also when an answer is lost on its way or comes too late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.chunk_writer import write
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from benchmarks.peer import Peer, descriptor

IDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="4MiB") as running:
        peer = Peer(running)
        peer.put(IDS)
        yield running
        peer.close()


@pytest.fixture
def session(node: Node) -> Iterator[Session]:
    link = DaemonConnection(ServiceAddress(node.cache_socket), "reader", descriptor())
    assert link.wait(30)
    assert link.session is not None
    yield link.session
    link.close()


def request(session: Session) -> pb.MatchRequest:
    return pb.MatchRequest(session_id=session.id, token_ids=IDS)


def leases(node: Node) -> int:
    return int(node.cache_stats().leases)


def reservations(node: Node) -> int:
    return int(node.cache_stats().reservations)


def header(ids: Sequence[int]) -> ChunkHeader:
    return new_header(Geometry.of(descriptor()), ids, 0)


def reserving(session: Session, *names: bytes) -> pb.ReserveRequest:
    return pb.ReserveRequest(session_id=session.id, headers=[header([7, 8])], reservation_ids=names)


def fill(number: int, payload: memoryview) -> None:
    payload[:] = bytes(len(payload))


class TooLate(grpc.RpcError):
    """The error of a call whose answer arrived after the deadline."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED


class Late:
    """A stub whose answers arrive too late. Its first ``without_time`` calls of Release have a timeout of 0."""

    def __init__(self, stub: Any, without_time: int = 0) -> None:
        self._stub, self._left = stub, without_time
        self.asked = 0
        self.Match = self.Release = self
        self._matched: Any = None

    def __call__(self, request: pb.MatchRequest, timeout: float) -> pb.MatchResponse:
        self.asked += len(self._stub.Match(request, timeout=timeout).matches)
        raise TooLate

    def future(self, request: Any, timeout: float) -> Any:
        if isinstance(request, pb.MatchRequest):
            self._matched = request
            return self
        self._left -= 1
        return self._stub.Release.future(request, timeout=0 if self._left >= 0 else timeout)

    def result(self) -> pb.MatchResponse:
        return self(self._matched, 5.0)


def test_an_answer_that_came_too_late_leaves_no_lease(node: Node, session: Session) -> None:
    late = session.stub = Late(session.stub)  # type: ignore[assignment]
    with pytest.raises(TooLate):
        session.match(request(session), 5.0)
    with pytest.raises(TooLate):
        session.match_async(request(session), 5.0)()
    assert late.asked == 2, "the daemon has leased"
    until(lambda: leases(node) == 0)


def test_a_release_that_was_not_answered_is_sent_again(node: Node, session: Session) -> None:
    found = session.match(request(session), 5.0)
    assert found.lease_id
    assert leases(node) == 1
    session.stub = Late(session.stub, without_time=3)  # type: ignore[assignment]
    session.release([found.lease_id])
    until(lambda: leases(node) == 0)


def test_a_caller_names_its_lease_unless_the_name_is_taken(node: Node, session: Session) -> None:
    names = []
    for _ in range(2):
        asked = request(session)
        asked.lease_id = b"n" * 16
        names.append(session.stub.Match(asked, timeout=30).lease_id)
    assert names[0] == b"n" * 16 != names[1]
    assert leases(node) == 2
    session.release(names)
    until(lambda: leases(node) == 0)


def test_a_name_of_another_length_is_refused(node: Node, session: Session) -> None:
    asked = request(session)
    asked.lease_id = b"n"
    with pytest.raises(grpc.RpcError, match="lease_id has 1 bytes; 16 random ones are needed") as refused:
        session.stub.Match(asked, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert leases(node) == 0


# ---- reservations -----------------------------------------------------------------------------------------------


class Lost:
    """A stub that loses the answers of one method. With ``heard``, the daemon gets the call first.

    The first ``without_time`` calls of Abort have a timeout of 0.
    """

    def __init__(self, stub: Any, name: str, heard: bool = True, without_time: int = 0) -> None:
        self._stub, self._name, self._heard, self._left = stub, name, heard, without_time

    def __getattr__(self, name: str) -> Any:
        if name == "Abort":
            return self
        return self._call if name == self._name else getattr(self._stub, name)

    def _call(self, request: Any, timeout: float) -> Any:
        if self._heard:
            getattr(self._stub, self._name)(request, timeout=timeout)
        raise TooLate

    def future(self, request: Any, timeout: float) -> Any:
        self._left -= 1
        return self._stub.Abort.future(request, timeout=0 if self._left >= 0 else timeout)


@pytest.mark.parametrize("name", ["Reserve", "Commit"])
@pytest.mark.parametrize("heard", [True, False])
def test_a_lost_answer_leaves_no_reservation(node: Node, session: Session, name: str, heard: bool) -> None:
    whole, ids = session.stub, [ord(name[0]), int(heard)]
    session.stub = Lost(whole, name, heard, without_time=2)  # type: ignore[assignment]
    with pytest.raises(TooLate):
        write(session, b"", [header(ids)], fill, 5.0)
    until(lambda: reservations(node) == 0)
    session.stub = whole
    written = write(session, b"", [header(ids)], fill, 5.0)
    assert written.stored == (True,)
    assert written.newly_stored == (name == "Reserve" or not heard,)


def test_what_an_engine_could_not_fill_is_given_up(node: Node, session: Session) -> None:
    def failing(number: int, payload: memoryview) -> None:
        assert reservations(node) == 1
        raise ValueError("the engine's blocks are gone")

    session.stub = Lost(session.stub, "nothing", without_time=2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="blocks are gone"):
        write(session, b"", [header([5, 6])], failing, 5.0)
    until(lambda: reservations(node) == 0)


def test_a_caller_names_its_reservations_unless_the_name_is_taken(node: Node, session: Session) -> None:
    first = session.stub.Reserve(reserving(session, b"n" * 16), timeout=30).reservations[0]
    again = pb.ReserveRequest(session_id=session.id, headers=[header([7, 9])], reservation_ids=[b"n" * 16])
    second = session.stub.Reserve(again, timeout=30).reservations[0]
    assert first.reservation_id == b"n" * 16 != second.reservation_id
    assert reservations(node) == 2
    session.abort([first.reservation_id, second.reservation_id])
    until(lambda: reservations(node) == 0)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([b"n"], "a reservation_id has 1 bytes; 16 random ones are needed"),
        ([b"n" * 16, b"m" * 16], "2 reservation_ids were sent for 1 headers; send one for each, or none"),
    ],
)
def test_other_names_of_reservations_are_refused(
    node: Node, session: Session, names: list[bytes], sentence: str
) -> None:
    with pytest.raises(grpc.RpcError, match=sentence) as refused:
        session.stub.Reserve(reserving(session, *names), timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert reservations(node) == 0
