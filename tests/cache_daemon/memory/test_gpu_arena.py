"""The GPU arena, over host memory behind the interface of a GPU: real daemons, descriptors, workers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.cuda_ipc import HANDLE_BYTES, CudaUnavailable, DescriptorMemory, LegacyMemory
from kvsidecar.kv_transfer.mapped_memory import map_gpu_arena, receive_handle

from benchmarks.condition_wait import until
from benchmarks.node import Node
from cache_daemon.memory.device_memory import CudaMemory, HostMemory
from cache_daemon.memory.fd_server import serve_fds
from cache_daemon.memory.gpu_arena import GpuArena
from tests.cache_daemon.conftest import Peer
from tests.inference_svc.engine.test_exactness import prompt

DEVICE = {"gpu_arena": "4MiB", "gpu_memory": "host", "heartbeat_ms": 200}


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start(**DEVICE)


def copied(peer: Peer, ids: list[int]) -> pb.ChunkMatch:
    """Match a prompt until its chunk has a copy."""
    found = list[pb.ChunkMatch]()

    def has_copy() -> bool:
        found[:] = peer.match(ids).matches
        return found[0].HasField("gpu_offset")

    until(has_copy)
    return found[0]


def test_a_session_that_maps_it_reads_copies_there(node: Node) -> None:
    writer, reader, ids = Peer(node), Peer(node), list(range(40))
    assert (writer.welcome.arena.kind, writer.welcome.gpu_arena.kind) == (pb.ARENA_KIND_HOST, pb.ARENA_KIND_HOST)
    writer.put(ids)
    assert not writer.match(ids).matches[0].HasField("gpu_offset")
    assert node.cache_stats().gpu_copies == 0, "nobody has mapped it"
    memory = map_gpu_arena(reader.welcome)
    there = copied(reader, ids)
    assert memory[there.gpu_offset :][: there.payload_bytes] == reader.view(there)
    stats = node.cache_stats()
    assert (stats.gpu_chunks, stats.gpu_copies, stats.gpu_arena_bytes) == (1, 1, 4 << 20)
    assert stats.gpu_tokens == 40
    writer.close()
    reader.close()


def test_chunks_outlive_it(node: Node) -> None:
    peer, ids = Peer(node), list(range(40))
    map_gpu_arena(peer.welcome)
    peer.put(ids)
    copied(peer, ids)
    node.settle()
    node.kill("daemon")
    peer.close()
    node.start_daemon()
    again = Peer(node)
    assert again.read(ids) == 40
    map_gpu_arena(again.welcome)
    copied(again, ids)
    again.close()


def test_memory_goes_when_its_last_holder_has_gone() -> None:
    memory = HostMemory(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        memory.send_handle(ours)
        _, (handle,), _, _ = socket.recv_fds(theirs, 1, 1)
    memory.write(4096, memoryview(b"kept"))
    memory.close()
    assert os.pread(handle, 4, 4096) == b"kept", "a worker's import outlives the daemon's"
    os.close(handle)


class Legacy(LegacyMemory):
    """Substitute of device memory that has only a handle."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.device_uuid = size_bytes, b"u" * 16

    def handle(self) -> bytes:
        return bytes(range(HANDLE_BYTES))


def test_memory_is_shared_by_legacy_handles_where_descriptors_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(size_bytes: int, device: int) -> None:
        raise CudaUnavailable("the device does not share memory by file descriptors")

    monkeypatch.setattr(DescriptorMemory, "create", refused)
    monkeypatch.setattr(LegacyMemory, "create", lambda size_bytes, device: Legacy(size_bytes))
    memory, session = CudaMemory(1 << 20), b"s" * 16
    described = GpuArena(memory).describe()
    assert described.kind == pb.ARENA_KIND_CUDA_IPC
    assert described.device_uuid == b"u" * 16

    class OnlyGpuArena:
        def gpu_arena(self, session_id: bytes, peer: socket.socket) -> None:
            if session_id != session:
                raise KeyError(session_id)
            memory.send_handle(peer)

        arena = staging = summary = gpu_arena

    path = tmp_path / "memory.sock"
    welcome = pb.Welcome(memory_socket=str(path), gpu_arena=described, session_id=session)
    stranger = pb.Welcome(memory_socket=str(path), gpu_arena=described, session_id=b"x" * 16)

    async def ask() -> bytes:
        async with serve_fds(path, OnlyGpuArena(), 0o600, lambda _: True):
            with pytest.raises(OSError, match="the session is not open"):
                await asyncio.to_thread(receive_handle, stranger, HANDLE_BYTES)
            return await asyncio.to_thread(receive_handle, welcome, HANDLE_BYTES)

    assert asyncio.run(ask()) == bytes(range(HANDLE_BYTES))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_start_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"no GPU arena of 2097152 bytes on device 0: .+"):
        CudaMemory(1 << 21)


@pytest.fixture(scope="module")
def workers() -> Iterator[Node]:
    # Patient: on a machine that stalls, a worker that distrusts its session for a moment computes instead.
    flags = {"gpu_arena": "64MiB", "gpu_memory": "host", "heartbeat_ms": 5000}
    # resident_sequences 0: no blocks stay in a worker's pool, so all reused tokens come from the daemon.
    own = {"cache_timeout_ms": 10_000, "resident_sequences": 0}
    with Node("demo", workers=2, pool_bytes="64MiB", daemon_flags=flags, worker_flags=own) as node:
        yield node


def ask(node: Node, worker: int, ids: list[int]) -> tuple[list[int], int]:
    result = node.client(worker).generate(ids, max_tokens=8, temperature=0, ignore_eos=True, deadline=60)
    return result.token_ids, result.cached_tokens


def test_two_workers_share_it_and_it_survives_both_kills(workers: Node) -> None:
    ids = prompt(5, 200)
    want, cached = ask(workers, 0, ids)
    assert cached == 0
    workers.settle()
    assert ask(workers, 1, ids) == (want, 199), "the second worker's first request hits what the first stored"
    assert workers.cache_stats().gpu_tokens == 0, "it read the arena in host memory"
    until(lambda: workers.cache_stats().gpu_chunks > 0)
    before = workers.cache_stats().gpu_tokens
    assert ask(workers, 0, ids) == (want, 199), "what is copied from one arena to the other has the same bits"
    assert workers.cache_stats().gpu_tokens - before == 200
    workers.kill("worker-0", signal.SIGKILL)
    assert ask(workers, 1, [*ids, *want])[1] >= 199, "a dead worker takes nothing with it"
    workers.kill("daemon")
    assert ask(workers, 1, prompt(6, 50))[1] == 0, "without a daemon, requests are computed"
    workers.start_daemon()
    workers.wait_attached(1)
    workers.start_worker(0)
    assert ask(workers, 0, ids) == (want, 199), "a new worker hits what the old ones stored"
    until(lambda: workers.cache_stats().gpu_chunks > 0)
    while not workers.cache_stats().gpu_tokens:  # once, the blocks of the request before may still be in the pool
        assert ask(workers, 0, ids) == (want, 199)
    maps = Path(f"/proc/{workers.pid('worker-1')}/maps").read_text()
    for arena in ("arena", "gpu-arena"):
        assert len(set(re.findall(rf"\S+ \S+ \S+ \S+ (\d+) +/memfd:kvsidecar-{arena}\b", maps))) == 1, (
            "no dead arena stays mapped"
        )
