"""The arena in device memory, over host memory behind the same interface: real daemons, descriptors, workers."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cache_daemon.device_arena import DeviceArena, handing_out
from cache_daemon.device_memory import CudaMemory, HostMemory
from kvsidecar.arenas import receive_descriptor, receive_handle
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cuda_memory import HANDLE_BYTES, CudaUnavailable, DescriptorMemory, LegacyMemory
from kvsidecar.errors import ConfigurationError

from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.test_durability import run_daemon
from tests.inference_svc.test_exactness import prompt

DEVICE = {"gpu_arena": "4MiB", "gpu_memory": "host", "heartbeat_ms": 200}


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start(**DEVICE)


def test_what_one_session_writes_another_reads(node: Node) -> None:
    writer, reader = Peer(node), Peer(node)
    assert writer.welcome.arenas[0].kind == pb.ARENA_KIND_HOST_DESCRIPTOR
    writer.put(list(range(40)))
    assert reader.read(list(range(40))) == 40
    writer.close()
    reader.close()


def test_chunks_come_back_from_disk_after_the_daemon_was_killed(node: Node) -> None:
    peer = Peer(node)
    peer.put(list(range(40)))
    node.settle()
    node.kill("daemon")
    peer.close()
    node.start_daemon()
    again = Peer(node)
    assert again.read(list(range(40))) == 40
    again.close()


def test_bytes_are_streamed_to_and_from_it(node: Node) -> None:
    peer = Peer(node)
    key = peer.put(list(range(24)))
    whole = peer.match(list(range(24)))
    stored = bytes(peer.view(whole.matches[0].slot))
    request = pb.FetchRequest(namespace=peer.namespace, prefix_hash=key)
    fetched = b"".join(part.data for part in peer.stub.Fetch(request))
    assert fetched == stored
    peer.close()


def test_a_stranger_gets_no_descriptor(node: Node) -> None:
    peer = Peer(node)
    with pytest.raises(OSError, match="the session is not open"):
        receive_descriptor(peer.welcome.arenas[0].path, secrets.token_bytes(16))
    with pytest.raises(OSError, match="the session is not open"):
        receive_descriptor(peer.welcome.arenas[0].path, b"\0" * 16)
    os.close(receive_descriptor(peer.welcome.arenas[0].path, peer.session))
    assert Path(peer.welcome.arenas[0].path).stat().st_mode & 0o777 == 0o600
    peer.close()


def test_one_that_says_nothing_keeps_nobody_waiting(node: Node) -> None:
    peer = Peer(node)
    path = peer.welcome.arenas[0].path
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as rude:
        silent.connect(path)
        rude.connect(path)
        rude.sendall(b"x" * 5)
        began = time.monotonic()
        os.close(receive_descriptor(path, peer.session))
        assert time.monotonic() - began < 1
    peer.close()


def test_a_socket_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * (98 - len(str(tmp_path))))
    flags = ("--store", "none", "--gpu-arena", "1MiB", "--gpu-memory", "host")
    done = run_daemon("--socket", str(folder / "c.sock"), *flags)
    assert done.returncode == 2
    assert "no socket can be made" in done.stderr
    assert "choose another --socket" in done.stderr


def test_memory_goes_when_its_last_holder_has_gone() -> None:
    memory = HostMemory(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        memory.hand_out(ours)
        _, (handle,), _, _ = socket.recv_fds(theirs, 1, 1)
    memory.write(4096, memoryview(b"kept"))
    memory.close()
    assert os.pread(handle, 4, 4096) == b"kept", "a worker's import outlives the daemon's"
    os.close(handle)


class Legacy(LegacyMemory):
    """Stands for device memory: only the handle is asked for."""

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
    arena = DeviceArena(CudaMemory(1 << 20), tmp_path / "a.sock")
    described, session = arena.describe(), b"s" * 16
    assert described.kind == pb.ARENA_KIND_CUDA_IPC
    assert described.device_uuid == b"u" * 16

    async def ask() -> bytes:
        async with handing_out(arena, session.__eq__):
            with pytest.raises(OSError, match="the session is not open"):
                await asyncio.to_thread(receive_handle, described.path, b"x" * 16, HANDLE_BYTES)
            return await asyncio.to_thread(receive_handle, described.path, session, HANDLE_BYTES)

    assert asyncio.run(ask()) == bytes(range(HANDLE_BYTES))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_start_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"no GPU arena of 2097152 bytes on device 0: .+"):
        CudaMemory(1 << 21)


@pytest.fixture(scope="module")
def workers() -> Iterator[Node]:
    # Patient: on a machine that stalls, a worker that distrusts its session for a moment computes instead.
    flags = {"gpu_arena": "64MiB", "gpu_memory": "host", "heartbeat_ms": 5000}
    patience = {"cache_timeout_ms": 10_000}
    with Node("demo", workers=2, pool_bytes="64MiB", daemon_flags=flags, worker_flags=patience) as node:
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
    workers.kill("worker-0", signal.SIGKILL)
    assert ask(workers, 1, [*ids, *want])[1] >= 199, "a dead worker takes nothing with it"
    workers.kill("daemon")
    assert ask(workers, 1, prompt(6, 50))[1] == 0, "without a daemon, requests are computed"
    workers.start_daemon()
    workers.wait_attached(1)
    workers.start_worker(0)
    assert ask(workers, 0, ids) == (want, 199), "a new worker hits what the old ones stored"
    maps = Path(f"/proc/{workers.pid('worker-1')}/maps").read_text()
    assert len(set(re.findall(r"\S+ \S+ \S+ \S+ (\d+) +/memfd:kvsidecar-arena", maps))) == 1, (
        "no dead arena stays mapped"
    )
