"""What the daemon leased is given back, also when an answer is lost on its way or comes too late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.connecting import Address
from kvsidecar.paged.link import DaemonLink
from kvsidecar.paged.session import Session

from benchmarks.node import Node
from benchmarks.peer import Peer, descriptor
from tests.cache_daemon.test_service import until

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
    link = DaemonLink(Address(node.cache_socket), "reader", descriptor())
    assert link.wait(5)
    assert link.session is not None
    yield link.session
    link.close()


def request(session: Session) -> pb.MatchRequest:
    return pb.MatchRequest(session_id=session.id, token_ids=IDS)


def leases(node: Node) -> int:
    return int(node.cache_stats().leases)


class TooLate(grpc.RpcError):
    """What a caller sees whose time was over when the answer came."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED


class Late:
    """A stub whose answers come, but too late; and whose first calls of Release have no time at all."""

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
        session.matching(request(session), 5.0)()
    assert late.asked == 2, "the daemon has leased"
    until(lambda: leases(node) == 0)


def test_a_release_that_was_not_answered_is_sent_again(node: Node, session: Session) -> None:
    found = session.match(request(session), 5.0)
    assert found.lease_id
    assert leases(node) == 1
    session.stub = Late(session.stub, without_time=3)  # type: ignore[assignment]
    session.give_back([found.lease_id])
    until(lambda: leases(node) == 0)


def test_a_caller_names_its_lease_unless_the_name_is_taken(node: Node, session: Session) -> None:
    names = []
    for _ in range(2):
        asked = request(session)
        asked.lease_id = b"n" * 16
        names.append(session.stub.Match(asked, timeout=5).lease_id)
    assert names[0] == b"n" * 16 != names[1]
    assert leases(node) == 2
    session.give_back(names)
    until(lambda: leases(node) == 0)


def test_a_name_of_another_length_is_refused(node: Node, session: Session) -> None:
    asked = request(session)
    asked.lease_id = b"n"
    with pytest.raises(grpc.RpcError, match="lease_id has 1 bytes; 16 random ones are needed") as refused:
        session.stub.Match(asked, timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert leases(node) == 0
