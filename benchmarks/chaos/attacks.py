"""Kinds of faults: each function injects one fault into a node under load."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

from benchmarks.chaos.fuzzer import fuzz
from benchmarks.chaos.victim_load import DurableChunkWatcher, VictimLoad, paths
from benchmarks.condition_wait import until
from benchmarks.node import Node
from benchmarks.peer import Peer, payload_of

PROMPTS = 240
_POLL_SECONDS = 0.005
_RECOVERED_WITHIN_SECONDS = 60.0
_PAGE = 4096


@dataclass
class RoundOutcome:
    """Result of one injected fault: wrong, leaked, lost and failed items, and the recovery time."""

    wrong: int = 0
    leaked: int = 0
    lost: int = 0
    failed: int = 0
    recovery_ms: float | None = None


@dataclass
class FaultScenario:
    """A node under load, and a writer process that a fault can stop or kill."""

    node: Node
    load: VictimLoad
    rng: random.Random
    chunk_paths: dict[bytes, list[int]] = field(default_factory=lambda: paths(PROMPTS))
    writer: subprocess.Popen[str] | None = None
    evicts: bool = False  # the node evicts durable chunks

    def let_run(self) -> None:
        time.sleep(self.rng.uniform(0.02, 0.3))

    def writing(self) -> subprocess.Popen[str]:
        if self.writer is None or self.writer.poll() is not None:
            command = [sys.executable, "-m", "benchmarks.chaos.writer", str(self.node.cache_socket)]
            self.writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self.writer

    def recovered(self, since: float) -> float:
        """Wait until a Match succeeds; return the milliseconds since ``since`` (monotonic time)."""
        deadline = time.monotonic() + _RECOVERED_WITHIN_SECONDS
        request = pb.MatchRequest(namespace=b"\0" * 32, token_ids=[1])
        while time.monotonic() < deadline:
            try:
                with self.node.cache_channel() as channel:
                    CacheServiceStub(channel).Match(request, timeout=1.0)
                return (time.monotonic() - since) * 1e3
            except grpc.RpcError:
                time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"the daemon did not come back: {self.node.read_log()}")

    def lost(self, durable: set[bytes]) -> int:
        """Count chunks that the daemon reported as durable but no longer finds.

        A chunk that a longer chunk has replaced counts as found. Returns 0 for a node that evicts, because it may have
        evicted chunks since its last report.
        """
        if self.evicts:
            return 0
        with self.node.cache_channel() as channel:
            stub, missing = CacheServiceStub(channel), 0
            peer = Peer(self.node)
            here = {c.prefix_hash for c in peer.list_all()}
            for key in durable - here:
                ids = self.chunk_paths.get(key)
                request = pb.MatchRequest(namespace=peer.namespace, token_ids=ids or ())
                missing += ids is None or stub.Match(request).matched_tokens < len(ids)
            peer.close()
        return missing

    def leaked(self) -> int:
        """Wait until the load is idle; count the arena pages, leases and reservations that have no owner then."""
        self.load.pause()
        try:
            deadline = time.monotonic() + 10
            peer = Peer(self.node)
            while True:
                stats = peer.stats()
                pages = sum(-(-c.payload_bytes // _PAGE) * _PAGE for c in peer.list_all() if c.resident)
                over = stats.leases + stats.reservations + abs(stats.arena_used_bytes - pages) // _PAGE
                if not over or time.monotonic() > deadline:
                    peer.close()
                    return int(over)
                time.sleep(0.02)
        finally:
            self.load.go_on()


def kill_daemon(scene: FaultScenario) -> RoundOutcome:
    """Kill the serving process, as the kernel's OOM killer does; its supervisor restarts it."""
    return _killed(scene, scene.node.crash_daemon)


def kill_daemon_and_supervisor(scene: FaultScenario) -> RoundOutcome:
    """Kill the daemon and its supervisor; the node then starts both again in a new interpreter."""

    def die() -> None:
        scene.node.kill("daemon")
        scene.node.start_daemon(wait=False)

    return _killed(scene, die)


def _killed(scene: FaultScenario, die: Callable[[], None]) -> RoundOutcome:
    scene.let_run()
    watcher = DurableChunkWatcher(scene.node)
    scene.let_run()
    scene.load.down.begin()
    began = time.monotonic()
    die()
    recovery = scene.recovered(began)
    scene.load.down.end()
    return RoundOutcome(lost=scene.lost(watcher.close()), recovery_ms=recovery)


def stop_daemon(scene: FaultScenario) -> RoundOutcome:
    """Stop the daemon for longer than the timeout of a session without heartbeats."""
    scene.let_run()
    scene.load.down.begin()
    scene.node.kill("daemon", signal.SIGSTOP)
    time.sleep(scene.rng.uniform(0.1, 1.0))
    began = time.monotonic()
    scene.node.kill("daemon", signal.SIGCONT)
    recovery = scene.recovered(began)
    scene.load.down.end()
    return RoundOutcome(recovery_ms=recovery)


def kill_client(scene: FaultScenario) -> RoundOutcome:
    """Kill a writer process while it fills staging and has a lease and a reservation."""
    writer = scene.writing()
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(f"{scene.rng.randrange(1 << 30)}\n")
    writer.stdin.flush()
    assert writer.stdout.readline().strip() == "half"
    time.sleep(scene.rng.uniform(0, 0.1))
    writer.kill()
    writer.wait()
    return RoundOutcome()


def stop_writer(scene: FaultScenario) -> RoundOutcome:
    """Stop a writer during a copy until its session has ended and another client has stored the chunk; resume it."""
    writer, token = scene.writing(), scene.rng.randrange(1 << 30)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write(f"{token}\n")
    writer.stdin.flush()
    assert writer.stdout.readline().strip() == "half"
    writer.send_signal(signal.SIGSTOP)
    peer, ids = Peer(scene.node), [token] * 4000
    until(lambda: not any(s.reservations for s in peer.stats().session_details if s.client_name == "peer"), 20.0)
    stored = peer.try_put(ids, 4000)
    writer.send_signal(signal.SIGCONT)
    wrong = 0
    for _ in range(20):  # the writer runs again meanwhile
        found = peer.match(ids)
        wrong += not peer.is_right(ids, found) or found.matched_tokens != 4000 * stored
        peer.release(found)
        time.sleep(0.01)
    told = writer.stdout.readline().strip()
    peer.close()
    return RoundOutcome(wrong=wrong + (told == "COMMIT_OUTCOME_COMMITTED"))


def damaged(scene: FaultScenario, damage: Callable[[Path], None]) -> RoundOutcome:
    """Damage the store's file while the daemon is down; the daemon must then start and serve correct bytes."""
    scene.let_run()
    scene.load.down.begin()
    began = time.monotonic()
    scene.node.kill("daemon")
    damage(scene.node.folder / "store" / "data.mdb")
    scene.node.start_daemon(wait=False)
    recovery = scene.recovered(began)
    scene.load.down.end()
    return RoundOutcome(recovery_ms=recovery)


def truncated_store(scene: FaultScenario) -> RoundOutcome:
    def damage(data: Path) -> None:
        with data.open("r+b") as file:
            file.truncate(scene.rng.randrange(data.stat().st_size))

    return damaged(scene, damage)


def flipped_store(scene: FaultScenario) -> RoundOutcome:
    def damage(data: Path) -> None:
        with data.open("r+b") as file:
            for _ in range(20):
                at = scene.rng.randrange(data.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << scene.rng.randrange(8)]))

    return damaged(scene, damage)


def arena_full_leased(scene: FaultScenario) -> RoundOutcome:
    """Lease the whole arena. The daemon must refuse further stores, and accept them after the leases end."""
    scene.load.pause()
    peer, held, wrong = Peer(scene.node), [], 0
    try:
        base, refused = scene.rng.randrange(1 << 30), False
        for n in range(4000):
            ids = [base + n] * 200
            if not peer.try_put(ids, 200):
                refused = True
                break
            held.append((ids, peer.match(ids)))
        wrong += not refused
        wrong += sum(not peer.is_right(ids, found) for ids, found in held)
        peer.release(*(found for _, found in held))
        wrong += not peer.try_put([base + 5000] * 200, 200)
    finally:
        peer.close()
        scene.load.go_on()
    return RoundOutcome(wrong=wrong)


def slow_reader(scene: FaultScenario) -> RoundOutcome:
    """Read only the first message of several streams, then stall."""
    peer = Peer(scene.node)
    ids = [scene.rng.randrange(1 << 30)] * 4000
    peer.try_put(ids, 4000)
    found = peer.stub.Match(pb.MatchRequest(namespace=peer.namespace, token_ids=ids))
    wrong, calls = 0, []
    for m in found.matches:
        request = pb.FetchRequest(namespace=peer.namespace, prefix_hash=m.prefix_hash)
        calls = [peer.stub.Fetch(request) for _ in range(8)]
    for call in calls:
        next(call)
    scene.let_run()
    for call in calls[1:]:
        call.cancel()
    if calls:
        data = b"".join(piece.data for piece in calls[0])
        wrong += data != payload_of(ids, len(data))
    peer.close()
    return RoundOutcome(wrong=wrong)


def vanished_client(scene: FaultScenario) -> RoundOutcome:
    """Disconnect clients between Reserve and Commit, and during a Store."""
    for _ in range(4):
        peer = Peer(scene.node)
        peer.reserve(*(peer.header([scene.rng.randrange(1 << 30)] * 100) for _ in range(8)))
        peer.close()
    return RoundOutcome()


def garbage(scene: FaultScenario) -> RoundOutcome:
    told = fuzz(scene.node.cache_socket, 0.5, 2, scene.rng.randrange(1 << 30))
    return RoundOutcome(failed=sum(told["wrong"].values()))


def replayed_epoch(scene: FaultScenario) -> RoundOutcome:
    """Use a session, its reservation and its epoch after a restart of the daemon, which must refuse them."""
    peer = Peer(scene.node)
    reserved = peer.reserve(peer.header([scene.rng.randrange(1 << 30)] * 10))[0]
    old = peer.session, peer.welcome.epoch
    peer.close()
    outcome = kill_daemon(scene)
    fresh, wrong = Peer(scene.node), 0
    item = pb.CommitItem(reservation_id=reserved.reservation_id)
    for session, epoch in ((old[0], old[1]), (fresh.session, old[1]), (old[0], fresh.welcome.epoch)):
        try:
            fresh.stub.Commit(pb.CommitRequest(session_id=session, epoch=epoch, items=[item]))
            wrong += 1
        except grpc.RpcError as error:
            known: Any = error
            wrong += known.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)
    fresh.close()
    outcome.wrong += wrong
    return outcome


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Mount a small file system at ``folder`` while the ``with`` block runs; yields False if that is not permitted."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


KINDS: dict[str, Callable[[FaultScenario], RoundOutcome]] = {
    "kill_daemon": kill_daemon,
    "kill_daemon_and_supervisor": kill_daemon_and_supervisor,
    "stop_daemon": stop_daemon,
    "kill_client": kill_client,
    "stop_writer": stop_writer,
    "truncated_store": truncated_store,
    "flipped_store": flipped_store,
    "arena_full_leased": arena_full_leased,
    "slow_reader": slow_reader,
    "vanished_client": vanished_client,
    "garbage": garbage,
    "replayed_epoch": replayed_epoch,
}
