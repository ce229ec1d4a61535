"""Faults of the remote tier under load: real daemons, a real server, a network that fails on command.

Whatever happens there, no prompt fails, no byte is wrong, no request waits long, and within five seconds of its return
the tier is used again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.node import Node
from benchmarks.peer import Peer, payload_of
from benchmarks.proxy import Proxy
from benchmarks.remote_servers import RedisServer, why_no_valkey
from tests.cache_daemon.remote.nodes import CHUNK, cuts_of, prompt
from tests.cache_daemon.rpc.test_fuzz import Bystander

pytestmark = [pytest.mark.alone, pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())]
PRICE = 0.01
# Computing a prompt of the tests takes .64 s. Nobody waits much longer than that, on a machine that does other things.
PATIENCE = 3.0
RECOVERY = 5.0
SOON = 20.0
# A connection that blocked the event loop would do so for a second.
STALL_MS = 800.0


class Fleet:
    """Two daemons, each with its own network path to one server."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.bystander = Bystander()
        self.bystander.start()
        stack.callback(self.bystander.over.set)
        self.server = stack.enter_context(RedisServer(folder))
        self.nodes: list[Node] = []
        self.networks: list[Proxy] = []
        self.peers: list[Peer] = []
        for _ in range(2):
            network = Proxy(self.server.port)
            stack.callback(network.close)
            flags = {"remote": f"redis://127.0.0.1:{network.port}?prefix=f", "remote_write": "all", "log_level": "info"}
            node = stack.enter_context(Node(workers=0, arena_bytes="16MiB", daemon_flags=flags))
            peer = Peer(node)
            stack.callback(peer.close)
            self.networks.append(network)
            self.nodes.append(node)
            self.peers.append(peer)
        self._next = 0
        for node in range(2):
            self.until(node, lambda stats: not stats.remote_failing)

    def fresh(self, chunks: int = 4) -> list[int]:
        """Return a new prompt."""
        self._next += 1
        return prompt(chunks, self._next)

    def read(self, node: int, ids: list[int]) -> None:
        parent = b""
        for start, end in pairwise([0, *cuts_of(ids)]):
            parent = self.peers[node].put(ids[start:end], start, parent)

    def ask(self, node: int, ids: list[int], price: float = PRICE) -> int:
        """Look a prompt up as a worker does, and check every byte; return the number of found tokens."""
        peer = self.peers[node]
        request = pb.MatchRequest(session_id=peer.session, token_ids=ids, cuts=cuts_of(ids), seconds_per_token=price)
        began = time.monotonic()
        found = peer.stub.Match(request, timeout=20)
        assert time.monotonic() - began < PATIENCE, "it kept a prompt waiting"
        at = 0
        for match in found.matches:
            assert match.start_position == at
            assert peer.view(match) == payload_of(ids[at : at + match.tokens], match.payload_bytes), "wrong bytes"
            at += match.matched_tokens
        peer.stub.Release(pb.ReleaseRequest(session_id=peer.session, lease_ids=[found.lease_id]), timeout=20)
        return at

    def finds(self, node: int, ids: list[int], tokens: int) -> bool:
        """Ask again until a prompt's stored tokens are found, because a busy machine may delay a lookup too much."""
        deadline = time.monotonic() + SOON
        while (found := self.ask(node, ids)) != tokens and time.monotonic() < deadline:
            time.sleep(0.05)
        return found == tokens

    def stats(self, node: int) -> Any:
        return self.peers[node].stats()

    def until(self, node: int, done: Callable[[Any], bool], seconds: float = 20.0) -> float:
        began = time.monotonic()
        while not done(self.stats(node)):
            assert time.monotonic() - began < seconds, self.stats(node)
            time.sleep(0.02)
        return time.monotonic() - began

    def sent(self, node: int) -> None:
        self.until(node, lambda stats: stats.remote_pending == 0)

    def works(self) -> bool:
        """Let A store a new prompt; return True if B finds it."""
        ids = self.fresh()
        self.read(0, ids)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if self.ask(1, ids) == len(ids):
                return True
            time.sleep(0.05)
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path_factory.mktemp("redis"))


def test_what_one_has_read_the_other_finds(fleet: Fleet) -> None:
    ids = fleet.fresh()
    fleet.read(0, ids)
    fleet.sent(0)
    assert fleet.finds(1, [*ids, 7], len(ids))
    stats = fleet.stats(1)
    assert stats.remote_engine == "valkey"
    assert stats.remote_tokens >= len(ids)
    assert stats.remote_latency_ms > 0


FAULTS: dict[str, tuple[Callable[[Fleet], None], Callable[[Fleet], None]]] = {
    "hung network": (
        lambda f: [n.hang() for n in f.networks] and None,
        lambda f: [n.go_on() for n in f.networks] and None,
    ),
    "cut network": (
        lambda f: [n.cut() for n in f.networks] and None,
        lambda f: [n.go_on() for n in f.networks] and None,
    ),
    "garbage": (
        lambda f: [setattr(n, "garbage", True) for n in f.networks] and None,
        lambda f: [n.go_on() for n in f.networks] and None,
    ),
    "stopped server": (lambda f: f.server.send(signal.SIGSTOP), lambda f: f.server.send(signal.SIGCONT)),
    "killed server": (lambda f: f.server.stop(), lambda f: f.server.start()),
    "full server": (
        lambda f: f.server.command("CONFIG", "SET", "maxmemory", "1mb"),
        lambda f: f.server.command("CONFIG", "SET", "maxmemory", "0"),
    ),
    "one node apart": (lambda f: f.networks[1].hang(), lambda f: f.networks[1].go_on()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_is_seen_and_all_heal(fleet: Fleet, fault: str) -> None:
    begin, end = FAULTS[fault]
    known, fresh = fleet.fresh(), [fleet.fresh() for _ in range(6)]
    fleet.read(0, known)
    fleet.sent(0)
    begin(fleet)
    try:
        for ids in fresh:
            fleet.read(0, ids)
            assert fleet.ask(0, ids) == len(ids), "what is here is here"
            assert fleet.ask(1, ids) in range(0, len(ids) + 1, CHUNK)
        if fault not in ("full server", "one node apart"):
            fleet.until(0, lambda stats: bool(stats.remote_failing))
        began = time.monotonic()
        if fault != "full server":
            for _ in range(5):
                fleet.ask(1, fleet.fresh())
            assert time.monotonic() - began < PATIENCE, "a tier that is known to fail costs nothing"
    finally:
        end(fleet)
    began = time.monotonic()
    while not fleet.works():
        assert time.monotonic() - began < RECOVERY, (fleet.stats(0), fleet.stats(1))
    for node in range(2):
        stats = fleet.stats(node)
        assert stats.leases == 0
        late_ms = fleet.bystander.late_ms  # the machine makes everybody wait that long
        assert stats.loop_stall_ms < STALL_MS + late_ms, "the event loop waited for the engine"
    if fault != "killed server":
        assert fleet.finds(1, known, len(known))


def test_a_slow_network_is_not_asked_for_what_is_quicker_computed(fleet: Fleet) -> None:
    ids = fleet.fresh()
    fleet.read(0, ids)
    fleet.sent(0)
    fleet.networks[1].delay_seconds = 0.2
    try:
        deadline = time.monotonic() + 20
        while fleet.stats(1).remote_latency_ms < 100:
            fleet.ask(1, fleet.fresh(), price=0.0005)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        asked = fleet.stats(1).remote_lookups
        for _ in range(5):
            assert fleet.ask(1, ids, price=0.0005) == 0
        assert fleet.stats(1).remote_lookups == asked
    finally:
        fleet.networks[1].go_on()
    began = time.monotonic()
    while fleet.ask(1, ids, price=0.005) != len(ids):
        assert time.monotonic() - began < RECOVERY + 5, fleet.stats(1)
        time.sleep(0.1)


def test_values_that_are_not_what_their_names_say_are_misses(fleet: Fleet) -> None:
    """Each is put in the place of another one; some are another format's besides."""
    ids = fleet.fresh()
    fleet.read(0, ids)
    fleet.sent(0)
    rejected = fleet.stats(1).remote_rejected
    names = [name for name in fleet.server.names() if not name.endswith("mark")]
    values = [bytearray(fleet.server.command("GET", name)) for name in names]
    for i, name in enumerate(names):
        value = values[i - 1]
        if i % 3 == 0:
            value[4] ^= 0xFF
        fleet.server.command("SET", name, bytes(value))
    assert fleet.ask(1, ids) == 0
    assert fleet.stats(1).remote_rejected > rejected
    began = time.monotonic()
    while not fleet.works():
        assert time.monotonic() - began < SOON, fleet.stats(1)


def test_callers_that_go_away_leave_nothing(fleet: Fleet) -> None:
    ids = fleet.fresh(8)
    fleet.read(0, ids)
    fleet.sent(0)
    peer = fleet.peers[1]
    used = fleet.stats(1).arena_used_bytes
    fleet.networks[1].hang()
    try:
        request = pb.MatchRequest(session_id=peer.session, token_ids=ids, cuts=cuts_of(ids), seconds_per_token=1.0)
        for _ in range(3):
            call = peer.stub.Match.future(request, timeout=20)
            with suppress(grpc.FutureTimeoutError):  # unless this machine stood still meanwhile
                call.result(timeout=0.05)
            call.cancel()
        fleet.until(1, lambda stats: stats.arena_used_bytes == used and stats.leases == 0)
    finally:
        fleet.networks[1].go_on()
    began = time.monotonic()
    while fleet.ask(1, ids) != len(ids):
        assert time.monotonic() - began < RECOVERY, fleet.stats(1)


def test_the_log_has_a_line_for_a_failure_and_none_for_a_request(fleet: Fleet) -> None:
    log = (fleet.nodes[1].folder / "log").read_text()
    away = [line for line in log.splitlines() if "the remote tier fails" in line]
    assert 1 <= len(away) <= 3 * len(FAULTS)
    assert "Traceback" not in log
    for secret in ("f/1.2", "\\xa5"):
        assert secret not in log
