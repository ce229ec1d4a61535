"""Memory of a device that the daemon allocates and workers import by a file descriptor.

The lifetime of such memory is defined when a process dies: it goes when the last process that holds it has gone. A dead
worker never pins it beyond its own end, and a dead daemon's is freed when the last worker lets go of it.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_CUDA, ARENA_KIND_HOST_DESCRIPTOR, ArenaKind
from kvsidecar.cuda_memory import CudaUnavailable, SharedMemory
from kvsidecar.errors import ConfigurationError


class DeviceMemory(Protocol):
    """One block. ``read`` and ``write`` may be called from any thread."""

    kind: ArenaKind.ValueType
    size_bytes: int
    device_uuid: bytes

    def descriptor(self) -> int:
        """A new file descriptor of the memory, which the caller closes."""
        ...

    def read(self, offset: int, size_bytes: int) -> memoryview: ...

    def write(self, offset: int, data: memoryview) -> None: ...

    def close(self) -> None: ...


class HostMemory:
    """The same in host memory (memfd), where there is no device: the reference implementation."""

    kind: ArenaKind.ValueType = ARENA_KIND_HOST_DESCRIPTOR
    device_uuid = b""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._file = os.memfd_create("kvsidecar-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._file, 0, size_bytes)
            self._map = mmap.mmap(self._file, size_bytes)
        except OSError as error:
            os.close(self._file)
            raise ConfigurationError(
                f"no room for {size_bytes} bytes of device memory on the host: {error.strerror}; choose a smaller size"
            ) from error

    def descriptor(self) -> int:
        return os.dup(self._file)

    def read(self, offset: int, size_bytes: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size_bytes]

    def write(self, offset: int, data: memoryview) -> None:
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        os.close(self._file)  # the mapping goes with its last view


class CudaMemory:
    """Memory of a GPU. Raises ConfigurationError when there is no cuda-bindings, no such device, or no room."""

    kind: ArenaKind.ValueType = ARENA_KIND_CUDA

    def __init__(self, size_bytes: int, device: int = 0) -> None:
        try:
            self._memory = SharedMemory.create(size_bytes, device)
        except CudaUnavailable as error:
            raise ConfigurationError(f"no GPU arena of {size_bytes} bytes on device {device}: {error}") from error
        self.size_bytes, self.device_uuid = self._memory.size_bytes, self._memory.device_uuid

    def descriptor(self) -> int:
        return self._memory.descriptor()

    def read(self, offset: int, size_bytes: int) -> memoryview:
        return self._memory.read(offset, size_bytes)

    def write(self, offset: int, data: memoryview) -> None:
        self._memory.write(offset, data)

    def close(self) -> None:
        self._memory.close()
