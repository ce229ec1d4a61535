"""A link to the daemon: when it may trust what it copied, and what a slow daemon costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer import shared_memory_transport as mapped_module
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import ServedCounts, Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="4MiB", daemon_flags={"heartbeat_ms": 300}) as running:
        yield running


def session(heartbeat_seconds: float = 1.0) -> Session:
    return Session(1, b"s" * 16, None, heartbeat_seconds, 4096)  # type: ignore[arg-type]


def test_what_counts_is_when_the_heartbeat_was_sent_not_when_its_answer_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that took two intervals says nothing of the last two: the daemon may have ended the session since."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    held = session()
    held.next_heartbeat(ServedCounts())
    now = 101.9
    held.record_ack(pb.HeartbeatAck())
    assert held.leases_valid
    now = 102.1
    assert not held.leases_valid, "it was sent more than two intervals ago"


def test_answers_belong_to_the_oldest_unanswered_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    held = session()
    held.next_heartbeat(ServedCounts())
    now = 11.0
    held.next_heartbeat(ServedCounts())
    held.record_ack(pb.HeartbeatAck())
    assert held.last_acked_at == 10.0
    held.record_ack(pb.HeartbeatAck())
    assert held.last_acked_at == 11.0


def test_heartbeats_go_on_while_a_large_arena_is_mapped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping and registering took longer than the daemon waits for a heartbeat, at every attempt, for ever."""
    real, attempts = mapped_module.map_arena, []

    def slowly(welcome: pb.Welcome) -> memoryview:
        attempts.append(time.monotonic())
        time.sleep(3.0)  # more than the 2 s that the daemon waits at least
        return real(welcome)

    monkeypatch.setattr(mapped_module, "map_arena", slowly)
    link = DaemonConnection(ServiceAddress(node.cache_socket), "slow", descriptor())
    try:
        assert link.wait(30)
        time.sleep(0.5)
        assert link.session is not None
        assert len(attempts) == 1
    finally:
        link.close()


def test_a_link_that_maps_nothing_does_not_need_what_cannot_be_mapped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's arena, for who has no GPU."""

    def fails(_: pb.Welcome) -> memoryview:
        raise OSError("memory of a GPU")

    monkeypatch.setattr(mapped_module, "map_arena", fails)
    link = DaemonConnection(ServiceAddress(node.cache_socket), "nothing", descriptor(), maps=False)
    try:
        assert link.wait(30)
        held = link.session
        assert held is not None
        assert held.summary is not None
    finally:
        link.close()


def test_a_call_that_was_not_answered_is_followed_by_a_question_and_not_by_another_call(node: Node) -> None:
    link = DaemonConnection(ServiceAddress(node.cache_socket), "patient", descriptor())
    try:
        assert link.wait(30)
        held = link.session
        assert held is not None
        held.suspect()
        assert link.session is None or held.responsive
        deadline = time.monotonic() + 30
        while link.session is not held:
            assert time.monotonic() < deadline, "the daemon answered, and is not asked again"
            time.sleep(0.01)
    finally:
        link.close()


def test_a_session_whose_memory_cannot_be_released_is_followed_by_another(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's driver may refuse to unmap an arena. The thread ended, and the engine never attached again."""
    link = DaemonConnection(ServiceAddress(node.cache_socket), "unmaps", descriptor())
    try:
        assert link.wait(30)
        held = link.session
        assert held is not None

        def refuses() -> None:
            monkeypatch.undo()
            raise OSError("cuIpcCloseMemHandle failed")

        monkeypatch.setattr(held.transport, "close", refuses)
        link.drop(held)
        until(lambda: link.session not in (None, held))
    finally:
        link.close()


def test_an_end_of_one_session_does_not_end_the_next(node: Node) -> None:
    link = DaemonConnection(ServiceAddress(node.cache_socket), "often", descriptor())
    try:
        seen = set()
        for _ in range(5):
            assert link.wait(30)
            held = link.session
            assert held is not None
            seen.add(held.id)
            link.drop(held)
            while link.session is held:
                time.sleep(0.001)
        assert len(seen) == 5
        assert link.wait(30)
        time.sleep(1.0)
        assert link.session is not None
    finally:
        link.close()


@pytest.mark.parametrize("name", ["Timer-", "kv-session-acks", "kv-session-heartbeats"])
def test_a_process_that_has_no_thread_to_spare_tries_again(
    name: str, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def limited(self: threading.Thread) -> None:
        of_timer = isinstance(self, threading.Timer) and name == "Timer-"
        if not refused and (of_timer or self.name == name):
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    link = DaemonConnection(ServiceAddress(node.cache_socket), "spare", descriptor("spare"))
    try:
        assert link.wait(30)
        assert refused
        assert "can't start new thread; serving without cache" in caplog.text
        until(lambda: [s.client_name for s in node.cache_stats().session_details].count("spare") == 1, 20)
    finally:
        link.close()


def test_the_daemon_is_told_what_the_worker_served(node: Node) -> None:
    link = DaemonConnection(ServiceAddress(node.cache_socket), "counts", descriptor())
    try:
        assert link.wait(30)
        link.served_counts = lambda: ServedCounts(prompts=3, prompt_tokens=100, cached_tokens=60, pool_tokens=20)
        deadline = time.monotonic() + 30
        while (stats := node.cache_stats()).prompt_tokens < 100:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (stats.prompts, stats.cached_tokens, stats.pool_tokens) == (3, 60, 20)
    finally:
        link.close()
