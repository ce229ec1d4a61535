"""The daemon's GPU memory in this process: imported from a file descriptor, read and written by kernels."""

from __future__ import annotations

import os

from kvkernels.native import visible
from kvkernels.payload import DeviceBytes
from kvsidecar.arenas import receive_descriptor
from kvsidecar.cache.v1.cache_pb2 import ArenaDescriptor
from kvsidecar.cuda_memory import CudaUnavailable, SharedMemory, device_uuid


class CudaArena:
    """An imported arena, on the device that torch computes on.

    Raises OSError when the driver or the daemon refuses, ValueError when the arena is another device's.
    """

    def __init__(self, described: ArenaDescriptor, session_id: bytes, device: int) -> None:
        try:
            if device_uuid(device) != described.device_uuid:
                raise ValueError(f"the daemon's arena is on another GPU than cuda:{device}; start it with --gpu-device")
            descriptor = receive_descriptor(described.path, session_id)
            try:
                self._memory = SharedMemory.imported(descriptor, described.size_bytes, device)
            finally:
                os.close(descriptor)
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
