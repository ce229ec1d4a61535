"""Payloads in the daemon's arenas: which of them a worker reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kvkernels.chunk_payload import DeviceBytes
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer import shared_memory_transport as module
from kvsidecar.kv_transfer.shared_memory_transport import SharedMemoryTransport

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.cache_daemon.conftest import Peer

IDS = list(range(40))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    flags = {"gpu_arena": "4MiB", "gpu_memory": "host", "heartbeat_ms": 5000}
    with Node(workers=0, arena_bytes="4MiB", daemon_flags=flags) as running:
        writer = Peer(running)
        writer.put(IDS)
        writer.close()
        yield running


@pytest.fixture
def peer(node: Node) -> Iterator[Peer]:
    made = Peer(node)
    yield made
    made.close()


def payload(transport: SharedMemoryTransport, match: pb.ChunkMatch) -> Any:
    (found,) = transport.read(b"", [match], 1.0)
    return found


def test_a_copy_in_the_gpu_arena_is_read_there(peer: Peer) -> None:
    transport = SharedMemoryTransport(peer.welcome, None, pytest.fail)
    until(lambda: peer.match(IDS).matches[0].HasField("gpu_offset"))
    match = peer.match(IDS).matches[0]
    assert isinstance(transport._gpu_arena, memoryview)
    start = match.gpu_offset
    assert payload(transport, match) == transport._gpu_arena[start : start + match.payload_bytes] == peer.view(match)
    match.gpu_offset = 4 << 20
    with pytest.raises(ValueError, match=r"a payload at 4194304\+\d+ is outside the arena"):
        payload(transport, match)
    transport.close()


class Imported:
    """Substitute of a GPU arena in device memory."""

    closed = False

    def __init__(self, welcome: pb.Welcome, device: int) -> None:
        self.device = device

    def __len__(self) -> int:
        return 1 << 20

    def part(self, offset: int, size_bytes: int) -> DeviceBytes:
        return DeviceBytes((1 << 40) + offset, size_bytes)

    def close(self) -> None:
        self.closed = True


def in_device_memory(peer: Peer) -> pb.Welcome:
    welcome = pb.Welcome()
    welcome.CopyFrom(peer.welcome)
    welcome.gpu_arena.kind = pb.ARENA_KIND_CUDA
    return welcome


def test_device_memory_is_read_in_place_and_the_rest_in_host_memory(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CudaArena", Imported)
    transport = SharedMemoryTransport(in_device_memory(peer), 3, pytest.fail)
    imported: Any = transport._gpu_arena
    assert imported.device == 3
    match = peer.match(IDS).matches[0]
    match.gpu_offset = 8192
    assert payload(transport, match) == DeviceBytes((1 << 40) + 8192, match.payload_bytes)
    match.ClearField("gpu_offset")
    assert payload(transport, match) == peer.view(match)
    transport.close()
    assert imported.closed


@pytest.mark.parametrize("error", [OSError("it cannot be imported: no driver"), ValueError("it is on another GPU")])
def test_a_worker_that_cannot_import_it_reads_host_memory_and_says_so(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Refused(Imported):
        def __init__(self, welcome: pb.Welcome, device: int) -> None:
            raise error

    monkeypatch.setattr(module, "CudaArena", Refused)
    said: list[str] = []
    transport = SharedMemoryTransport(in_device_memory(peer), 0, said.append)
    assert said == [f"the daemon's GPU arena is not used, chunks come from host memory: {error}"]
    match = peer.match(IDS).matches[0]
    match.gpu_offset = 0
    assert payload(transport, match) == peer.view(match)
    transport.close()


def test_a_worker_without_a_gpu_says_nothing(peer: Peer) -> None:
    transport = SharedMemoryTransport(in_device_memory(peer), None, pytest.fail)
    assert transport._gpu_arena is None
    transport.close()
