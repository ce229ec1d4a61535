"""Device memory that the daemon allocates and workers import.

If the device supports it, the daemon exports the memory as a file descriptor: the driver frees such memory when the
last process that holds the descriptor ends. So a dead worker never pins it, and the memory of a dead daemon is freed
when the last worker releases it. Older devices and drivers use legacy handles; such memory is freed when the daemon
ends.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol

import structlog
from kvsidecar.cache.v1.cache_pb2 import (
    ARENA_KIND_CUDA,
    ARENA_KIND_CUDA_IPC,
    ARENA_KIND_HOST,
    ArenaKind,
)
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.cuda_ipc import CudaUnavailable, DescriptorMemory, LegacyMemory

from cache_daemon.memory.shared_memory import SharedMemory

log = structlog.get_logger("cache_daemon")


class DeviceMemory(Protocol):
    """One block of device memory. ``read`` and ``write`` may be called from any thread."""

    size_bytes: int
    device_uuid: bytes

    @property
    def kind(self) -> ArenaKind.ValueType: ...

    def send_handle(self, peer: socket.socket) -> None:
        """Send the handle by which another process imports the memory. Raises OSError."""
        ...

    def read(self, offset: int, size_bytes: int) -> memoryview: ...

    def write(self, offset: int, data: memoryview) -> None: ...

    def close(self) -> None: ...


class HostMemory:
    """Host memory in place of a device: the reference implementation."""

    kind = ARENA_KIND_HOST
    device_uuid = b""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._shared = SharedMemory("gpu-arena", size_bytes, writable_by_others=False)

    def send_handle(self, peer: socket.socket) -> None:
        socket.send_fds(peer, [b"\1"], [self._shared.descriptor])

    def read(self, offset: int, size_bytes: int) -> memoryview:
        return memoryview(bytes(self._shared.memory[offset : offset + size_bytes]))

    def write(self, offset: int, data: memoryview) -> None:
        self._shared.memory[offset : offset + len(data)] = data

    def close(self) -> None:
        self._shared.close()


class CudaMemory:
    """GPU memory, shared by descriptor if the device can, else by legacy handle.

    Raises ConfigurationError without cuda-bindings, without such a device, or if the device has too little memory.
    """

    def __init__(self, size_bytes: int, device: int = 0) -> None:
        self._memory: DescriptorMemory | LegacyMemory
        try:
            try:
                self._memory = DescriptorMemory.create(size_bytes, device)
            except CudaUnavailable as refused:
                self._memory = LegacyMemory.create(size_bytes, device)
                log.warning(
                    "GPU memory is shared by legacy handles: it goes with this process, whoever uses it",
                    reason=str(refused),
                )
        except CudaUnavailable as error:
            raise ConfigurationError(f"no GPU arena of {size_bytes} bytes on device {device}: {error}") from error
        self.size_bytes, self.device_uuid = self._memory.size_bytes, self._memory.device_uuid

    @property
    def kind(self) -> ArenaKind.ValueType:
        return ARENA_KIND_CUDA if isinstance(self._memory, DescriptorMemory) else ARENA_KIND_CUDA_IPC

    def send_handle(self, peer: socket.socket) -> None:
        if isinstance(self._memory, LegacyMemory):
            peer.sendall(self._memory.handle())
            return
        descriptor = self._memory.descriptor()
        try:
            socket.send_fds(peer, [b"\1"], [descriptor])
        finally:
            os.close(descriptor)

    def read(self, offset: int, size_bytes: int) -> memoryview:
        return self._memory.read(offset, size_bytes)

    def write(self, offset: int, data: memoryview) -> None:
        self._memory.write(offset, data)

    def close(self) -> None:
        self._memory.close()
