"""Memory between processes: who can read, who can write, and what a hung or hostile worker can do (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.mapped_memory import ARENA, STAGING, receive_descriptor

from benchmarks.condition_wait import until
from benchmarks.node import Node
from cache_daemon.memory.arena import ALIGNMENT, HostArena
from cache_daemon.memory.fd_server import _REQUEST_TIMEOUT_SECONDS, serve_fds
from cache_daemon.memory.shared_memory import SharedMemory
from cache_daemon.memory.staging_memory import StagingBudget, StagingMemory
from tests.cache_daemon.conftest import Peer, payload_of
from tests.cache_daemon.store.test_durability import run_daemon


def open_descriptors() -> int:
    """Count the descriptors of this test's memory; gRPC closes those of earlier channels at any time."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:kvsidecar-test" in os.readlink(f"/proc/self/fd/{number}")
    return found


def test_dropped_memory_and_memory_that_cannot_be_mapped_close_their_descriptors() -> None:
    gc.collect()  # what earlier tests left
    before = open_descriptors()
    memory = SharedMemory("test", 4096, writable_by_others=True)
    assert open_descriptors() > before
    del memory
    with pytest.raises(ConfigurationError, match="for the test"):
        SharedMemory("test", 1 << 60, writable_by_others=True)
    gc.collect()  # the error's traceback refers to the object
    assert open_descriptors() == before


def test_nobody_but_the_daemon_can_write_to_the_arena(peer: Peer) -> None:
    peer.put([1, 2, 3])
    handle = receive_descriptor(peer.welcome, ARENA)
    try:
        for attack in (
            lambda: mmap.mmap(handle, 4096),
            lambda: os.pwrite(handle, b"x", 0),
            lambda: os.ftruncate(handle, 0),
            lambda: os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_TRUNC),
        ):
            with pytest.raises(OSError, match="not permitted"):
                attack()
        again = os.open(f"/proc/self/fd/{handle}", os.O_RDWR)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(again, b"x", 0)
        os.close(again)
    finally:
        os.close(handle)
    assert peer.read([1, 2, 3]) == 3


def test_staging_cannot_be_cut_under_the_daemon(peer: Peer) -> None:
    handle = receive_descriptor(peer.welcome, STAGING)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(handle, 0)
    os.close(handle)


def test_a_writer_that_wakes_up_late_changes_nothing(daemon: Node) -> None:
    """A worker that was stopped while it filled a chunk, past its session's end, wrote over what another had stored."""
    late, other = Peer(daemon, heartbeats=False), Peer(daemon)
    reserved = late.reserve(late.header([1, 2, 3]))[0]
    until(lambda: other.stats().sessions == 1)
    keys_ = [other.put([1, 2, 3]), *(other.put([10 + i]) for i in range(30))]
    late.staged(reserved.staging)[:] = b"\xff" * reserved.staging.size_bytes
    late.staging[: 1 << 20] = b"\xff" * (1 << 20)
    assert len(set(keys_)) == 31
    assert other.read([1, 2, 3]) == 3
    assert all(other.read([10 + i]) == 1 for i in range(30))
    other.close()
    late.close()


STOPPED_WRITER = """
import sys
from pathlib import Path
from tests.cache_daemon.conftest import Peer, payload_of
from kvsidecar.process.runtime_dir import socket_target
import grpc

class There:
    def cache_channel(self):
        return grpc.insecure_channel(socket_target(Path(sys.argv[1])))

peer = Peer(There())
reserved = peer.reserve(peer.header(list(range(2000))))[0]
view = peer.staged(reserved.staging)
data = payload_of(list(range(2000)), len(view))
view[: len(view) // 2] = data[: len(view) // 2]
print("half", flush=True)
sys.stdin.readline()
view[len(view) // 2 :] = b"z" * (len(view) - len(view) // 2)
try:
    peer.commit(reserved)
    print("committed", flush=True)
except grpc.RpcError as error:
    print(error.code().name, flush=True)
"""


def test_a_process_stopped_in_the_middle_of_a_copy_loses_its_session_and_harms_nobody(daemon: Node) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STOPPED_WRITER), str(daemon.cache_socket)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = Peer(daemon)
    assert writer.stdout is not None
    assert writer.stdin is not None
    try:
        assert writer.stdout.readline() == "half\n"
        writer.send_signal(signal.SIGSTOP)
        until(lambda: other.stats().sessions == 1)
        other.put(list(range(2000)))
        writer.send_signal(signal.SIGCONT)
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "UNAUTHENTICATED\n"
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()
    assert other.read(list(range(2000))) == 2000
    other.close()


def test_what_is_written_while_the_daemon_copies_is_never_served(peer: Peer) -> None:
    """The checksum is of the daemon's copy, so bytes that change between reading and copying are refused."""
    ids = list(range(1000))
    reserved = peer.reserve(peer.header(ids))[0]
    view = peer.staged(reserved.staging)
    view[:] = payload_of(ids, len(view))
    right = keys.checksum(view)
    view[5] ^= 1
    items = [pb.CommitItem(reservation_id=reserved.reservation_id, checksum=right)]
    answer = peer.stub.Commit(pb.CommitRequest(session_id=peer.session, epoch=peer.welcome.epoch, items=items))
    assert list(answer.outcomes) == [pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH]
    assert peer.read(ids) == 0


def test_a_stranger_gets_no_memory(peer: Peer) -> None:
    for session_id in (secrets.token_bytes(16), b"\0" * 16):
        forged = pb.Welcome(memory_socket=peer.welcome.memory_socket, session_id=session_id, arena=peer.welcome.arena)
        for which in (ARENA, STAGING, b"i", b"?"):
            with pytest.raises(OSError, match="the session is not open"):
                receive_descriptor(forged, which)
    assert Path(peer.welcome.memory_socket).stat().st_mode & 0o777 == 0o600


def test_one_that_says_nothing_keeps_nobody_waiting(peer: Peer) -> None:
    def seconds() -> float:
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as rude:
            silent.connect(peer.welcome.memory_socket)
            rude.connect(peer.welcome.memory_socket)
            rude.sendall(b"x" * 5)
            began = time.monotonic()
            os.close(receive_descriptor(peer.welcome, ARENA))
            return time.monotonic() - began

    # Other processes may be in the way once; a wait of the daemon's own is there every time.
    assert min(seconds() for _ in range(3)) < _REQUEST_TIMEOUT_SECONDS, "as long as either of them may take"


def test_memory_is_handed_out_again_after_the_daemon_ran_out_of_descriptors(start: Callable[..., Node]) -> None:
    """Running out of them once ended the hand-out for good."""
    node = start()
    peer = Peer(node)
    pid = node.pid("daemon")
    open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now, hard))
    knocking = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    try:
        for s in knocking:
            s.settimeout(1)
            s.connect(peer.welcome.memory_socket)
        time.sleep(0.5)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for s in knocking:
            s.close()
    time.sleep(0.5)
    os.close(receive_descriptor(peer.welcome, ARENA))
    peer.put([1])
    assert peer.read([1]) == 1
    peer.close()


def test_a_socket_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * (98 - len(str(tmp_path))))
    done = run_daemon("--socket", str(folder / "c.sock"), "--store", "none", "--arena-bytes", "1MiB")
    assert done.returncode == 2
    assert "no socket can be made" in done.stderr
    assert "choose another --socket" in done.stderr


def test_the_daemon_takes_memory_as_it_is_used(start: Callable[..., Node]) -> None:
    node = start(arena_bytes="1GiB")

    def megabytes(mapping: str = "") -> float:
        """Resident memory of all mappings whose line contains a text."""
        line, kibibytes = "", 0
        for text in Path(f"/proc/{node.pid('daemon')}/smaps").read_text().splitlines():
            name, *values = text.split()
            if not name.endswith(":"):
                line = text
            elif name == "Rss:" and mapping in line:
                kibibytes += int(values[0])
        return kibibytes / 1024

    arena = "/memfd:kvsidecar-arena"
    assert megabytes() < 200
    assert megabytes(arena) == 0
    peer = Peer(node)
    peer.put([1])
    until(lambda: megabytes() > 64)
    until(lambda: megabytes(arena) >= 64)
    assert megabytes(arena) < 200
    assert megabytes() < 300
    peer.close()


@pytest.mark.parametrize("payload_bytes", [ALIGNMENT, ALIGNMENT + 8])
def test_pages_of_the_arena_exist_before_their_use(payload_bytes: int) -> None:
    arena = HostArena(128 << 20)
    try:
        first, second = arena.allocate(payload_bytes), arena.allocate(48 << 20)
        assert first is not None
        assert second is not None
        until(lambda: os.fstat(arena.descriptor).st_blocks * 512 >= 64 << 20)
        payload = memoryview(b"\xab" * (48 << 20))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arena.write(second, payload)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100  # the arena's slot has 12,288 pages
    finally:
        arena.close()


def test_idle_staging_gives_its_memory_back_and_never_what_is_reserved() -> None:
    staging = StagingMemory(64 << 20)
    whole = staging.allocate(60 << 20)
    assert whole is not None
    with staging.view(whole) as view:
        view[:] = b"\xab" * len(view)
    staging.trim()
    with staging.view(whole) as view:
        assert view[-1] == 0xAB, "what is reserved stays"
    staging.free(whole)
    for _ in range(20):
        staging.trim()
    assert os.fstat(staging.descriptor).st_blocks * 512 <= 9 << 20
    again = staging.allocate(60 << 20)
    assert again is not None
    staging.close()


class Shares:
    """Server that sends one byte instead of a file descriptor, or fails."""

    failing = False

    def arena(self, session_id: bytes, peer: socket.socket) -> None:
        if self.failing:
            raise RuntimeError("the driver is gone")
        peer.send(b"1")

    gpu_arena = staging = summary = arena


def asked_for_arena(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(path))
        try:
            peer.sendall(bytes(16) + ARENA)
            return peer.recv(1)
        except ConnectionError:  # closed before it was read
            return b""


async def test_an_answer_that_fails_leaves_the_memory_socket_serving(tmp_path: Path) -> None:
    shares, path = Shares(), tmp_path / "memory"
    shares.failing = True
    async with serve_fds(path, shares, 0o600, lambda _: True):
        with structlog.testing.capture_logs() as lines:
            assert await asyncio.to_thread(asked_for_arena, path) == b""
        assert [line["event"] for line in lines] == ["memory could not be given to a session"]
        shares.failing = False
        assert await asyncio.to_thread(asked_for_arena, path) == b"1"


async def test_a_peer_that_is_not_allowed_gets_no_memory(tmp_path: Path) -> None:
    """It knows the socket and an open session, and is refused all the same."""
    allowed, path = [False], tmp_path / "memory"
    async with serve_fds(path, Shares(), 0o600, lambda _: allowed[0]):
        assert await asyncio.to_thread(asked_for_arena, path) == b""
        allowed[0] = True
        assert await asyncio.to_thread(asked_for_arena, path) == b"1"


def test_staging_that_shares_an_allowance_keeps_no_idle_memory() -> None:
    size = 1 << 20
    kept, shared = StagingMemory(size), StagingMemory(size, StagingBudget(size))
    for staging, idle in ((kept, size), (shared, 0)):
        slot = staging.allocate(size)
        assert slot is not None
        staging.view(slot)[:] = b"x" * size
        staging.free(slot)
        assert os.fstat(staging.descriptor).st_blocks * 512 == idle
        staging.close()


def test_sessions_of_one_caller_share_an_allowance_of_staging() -> None:
    shared = StagingBudget(2 * ALIGNMENT)
    first, second = StagingMemory(4 * ALIGNMENT, shared), StagingMemory(4 * ALIGNMENT, shared)
    slot = first.allocate(2 * ALIGNMENT)
    assert slot is not None
    assert second.allocate(1) is None
    first.free(slot)
    assert second.allocate(1) is not None
    first.close()
    second.close()
