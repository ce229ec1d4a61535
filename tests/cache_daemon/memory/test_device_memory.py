"""Device memory of the daemon over a driver whose copies land late, read by another holder."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from kvkernels import dispatch, kv_pack_reference
from kvkernels.chunk_payload import DeviceBytes
from kvkernels.cuda import imported_memory
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry, layout_of, new_header
from kvsidecar.kv_transfer import cuda_ipc
from kvsidecar.kv_transfer.cuda_ipc import CudaUnavailable, DescriptorMemory

from cache_daemon.memory.device_memory import CudaMemory
from tests.kvkernels.doubles.fake_driver import FakeDriver

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (pip install 'kvsidecar[gpu]')")

CHUNK = bytes(range(1, 256)) * 4096


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver.for_test()
    yield fake
    fake.close()


def test_a_promoted_chunk_is_complete_for_another_holder(driver: FakeDriver) -> None:
    """The driver may return while the last part of pageable memory is on its way; a worker reads at once."""
    memory = CudaMemory(4 << 20)
    assert isinstance(memory._memory, DescriptorMemory)
    descriptor = memory._memory.descriptor()
    worker = DescriptorMemory.imported(descriptor, memory.size_bytes, 0)
    os.close(descriptor)
    memory.write(4096, memoryview(CHUNK))
    assert ctypes.string_at(worker.address + 4096, len(CHUNK)) == CHUNK
    worker.close()
    memory.close()


def test_a_worker_maps_the_arena_for_reading_only(driver: FakeDriver) -> None:
    memory = DescriptorMemory.create(2 << 20, 0)
    descriptor = memory.descriptor()
    worker = DescriptorMemory.imported(descriptor, memory.size_bytes, 0)
    os.close(descriptor)
    with open("/proc/self/maps") as maps:
        rights = {int(line.split("-")[0], 16): line.split()[1] for line in maps}
    assert rights[worker.address].startswith("r--")
    assert rights[memory.address].startswith("rw-")
    worker.close()
    memory.close()


def test_memory_that_cannot_be_mapped_leaves_nothing(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker tries again every two seconds, and would fill its address space and the card."""
    calls: list[str] = []
    call = cuda_ipc._call

    def refusing(cuda: object, name: str, *arguments: object) -> object:
        calls.append(name)
        if name == "cuMemSetAccess":
            raise CudaUnavailable("cuMemSetAccess says no")
        return call(cuda, name, *arguments)

    monkeypatch.setattr(cuda_ipc, "_call", refusing)
    with pytest.raises(CudaUnavailable, match="says no"):
        DescriptorMemory.create(2 << 20, 0)
    assert calls[-3:] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def test_a_pool_without_kernels_reads_the_arena_through_host_memory(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel takes float32, so each load failed and ended the session, again and again."""
    header = new_header(Geometry(2, 2, 64, DATA_TYPE_FLOAT32, 16), list(range(40)), 0)
    stored, loaded, payload = (
        torch.randn(2, 2, 2, 40, 64),
        torch.zeros(2, 2, 2, 40, 64),
        bytearray(header.payload_bytes),
    )
    arrays = layout_of(header).arrays(memoryview(payload))
    kv_pack_reference.pack(*stored, torch.arange(40), header, arrays)
    arena = DescriptorMemory.create(2 << 20, 0)
    arena.write(8192, memoryview(payload))
    imported_memory.register_range(arena.address, arena.size_bytes, arena.read)
    monkeypatch.setattr(dispatch.cpu_chunks, "serves", lambda keys: False)  # the pool is on a device
    part = DeviceBytes(arena.address + 8192, len(payload))
    dispatch.unpack_chunk(*loaded, torch.arange(40), header, part)
    assert torch.equal(loaded, stored)
    imported_memory.unregister_range(arena.address, arena.close)
    with pytest.raises(ValueError, match="its session has ended"):
        dispatch.unpack_chunk(*loaded, torch.arange(40), header, part)
