"""The daemon's GPU memory in this process: imported, read and written by kernels."""

from __future__ import annotations

import os

from kvkernels.native import visible
from kvkernels.payload import DeviceBytes
from kvsidecar.arenas import receive_descriptor, receive_handle
from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_CUDA_IPC, ArenaDescriptor
from kvsidecar.cuda_memory import (
    HANDLE_BYTES,
    CudaUnavailable,
    DescriptorMemory,
    LegacyMemory,
    SharedMemory,
    device_uuid,
)


class CudaArena:
    """An imported arena, on the device that torch computes on.

    Raises OSError when the driver or the daemon refuses, ValueError when the arena is another device's.
    """

    def __init__(self, described: ArenaDescriptor, session_id: bytes, device: int) -> None:
        try:
            if device_uuid(device) != described.device_uuid:
                raise ValueError(f"the daemon's arena is on another GPU than cuda:{device}; start it with --gpu-device")
            self._memory = _imported(described, session_id, device)
        except CudaUnavailable as error:
            raise OSError(f"the daemon's GPU arena cannot be imported: {error}") from error
        visible.adopt(self._memory.address, len(self))

    def __len__(self) -> int:
        return self._memory.size_bytes

    def part(self, offset: int, size_bytes: int) -> DeviceBytes:
        """A slot's bytes."""
        return DeviceBytes(self._memory.address + offset, size_bytes)

    def copy(self, part: DeviceBytes) -> memoryview:
        """A slot's bytes, on the host."""
        return self._memory.read(part.address - self._memory.address, part.size_bytes)

    def close(self) -> None:
        """Lets go of the memory, once no kernel uses it. Idempotent."""
        visible.give_up(self._memory.address, self._memory.close)


def _imported(described: ArenaDescriptor, session_id: bytes, device: int) -> SharedMemory:
    if described.kind == ARENA_KIND_CUDA_IPC:
        handle = receive_handle(described.path, session_id, HANDLE_BYTES)
        return LegacyMemory.imported(handle, described.size_bytes, device)
    descriptor = receive_descriptor(described.path, session_id)
    try:
        return DescriptorMemory.imported(descriptor, described.size_bytes, device)
    finally:
        os.close(descriptor)
