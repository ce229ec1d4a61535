"""Device memory of the daemon over a driver whose copies land late, read by another holder."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
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
