"""The daemon's GPU arena, imported into this process."""

from __future__ import annotations

import os

from kvkernels.chunk_payload import DeviceBytes
from kvkernels.cuda import imported_memory

from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_CUDA_IPC, Welcome
from kvsidecar.kv_transfer.cuda_ipc import (
    HANDLE_BYTES,
    CudaUnavailable,
    DescriptorMemory,
    LegacyMemory,
    SharedDeviceMemory,
    device_uuid,
)
from kvsidecar.kv_transfer.mapped_memory import GPU_ARENA, receive_descriptor, receive_handle


class CudaArena:
    """An imported arena on torch's device; kernels read it in place.

    Raises OSError when the driver or the daemon refuses. Raises ValueError when the arena belongs to another device.
    """

    def __init__(self, welcome: Welcome, device: int) -> None:
        try:
            if device_uuid(device) != welcome.gpu_arena.device_uuid:
                raise ValueError(f"it is on another GPU than cuda:{device}; start the daemon with --gpu-device")
            self._memory = _imported(welcome, device)
        except CudaUnavailable as error:
            raise OSError(f"it cannot be imported: {error}") from error
        imported_memory.register_range(self._memory.address, len(self), self._memory.read)
        self._closed = False

    def __len__(self) -> int:
        return self._memory.size_bytes

    def part(self, offset: int, size_bytes: int) -> DeviceBytes:
        """Return a slot's bytes."""
        return DeviceBytes(self._memory.address + offset, size_bytes)

    def close(self) -> None:
        """Release the memory once no kernel uses it. Idempotent."""
        if not self._closed:
            self._closed = True
            imported_memory.unregister_range(self._memory.address, self._memory.close)


def _imported(welcome: Welcome, device: int) -> SharedDeviceMemory:
    size_bytes = welcome.gpu_arena.size_bytes
    if welcome.gpu_arena.kind == ARENA_KIND_CUDA_IPC:
        return LegacyMemory.imported(receive_handle(welcome, HANDLE_BYTES), size_bytes, device)
    descriptor = receive_descriptor(welcome, GPU_ARENA)
    try:
        return DescriptorMemory.imported(descriptor, size_bytes, device)
    finally:
        os.close(descriptor)
