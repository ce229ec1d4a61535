"""CUDA device memory shared between processes.

If the driver supports it, the memory is shared by a file descriptor (the driver's virtual memory management). Such
memory exists until the last process that holds it ends. Otherwise the memory is shared by a legacy IPC handle, and ends
with the process that allocated it.

Needs ``cuda-bindings`` (``pip install 'kvsidecar[gpu]'``) and a driver; imports and loads them at first use.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class CudaUnavailable(OSError):
    """CUDA memory is unavailable; the message names the call that refused."""


class SharedDeviceMemory:
    """A range of device memory at ``address`` in this process. Thread-safe."""

    def __init__(self, cuda: Any, context: Any, uuid: bytes, address: int, size_bytes: int) -> None:
        self._cuda, self._context = cuda, context
        self.device_uuid, self.address, self.size_bytes = uuid, address, size_bytes

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """Copy to the host."""
        _call(self._cuda, "cuCtxSetCurrent", self._context)  # the context is per thread
        out = bytearray(size_bytes)
        _call(self._cuda, "cuMemcpyDtoH", out, self.address + offset, size_bytes)
        return memoryview(out)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy from the host. At return, every process that holds the memory can read the bytes."""
        _call(self._cuda, "cuCtxSetCurrent", self._context)
        _call(self._cuda, "cuMemcpyHtoD", self.address + offset, bytes(data), len(data))
        # The driver may return before the last part of pageable memory was copied, but another process reads it next.
        _call(self._cuda, "cuCtxSynchronize")

    def close(self) -> None:
        """Release the memory. No thread of this process may be using it."""
        raise NotImplementedError


class DescriptorMemory(SharedDeviceMemory):
    """Device memory shared by a file descriptor. Made by ``create`` or ``imported``."""

    def __init__(
        self, cuda: Any, device: int, size_bytes: int, handle: Any, context: Any, uuid: bytes, *, writable: bool
    ) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(_call, cuda, "cuMemRelease", handle)
            address = int(_call(cuda, "cuMemAddressReserve", size_bytes, 0, 0, 0))
            undo.callback(_call, cuda, "cuMemAddressFree", address, size_bytes)
            super().__init__(cuda, context, uuid, address, size_bytes)
            _call(cuda, "cuMemMap", address, size_bytes, 0, handle, 0)
            undo.callback(_call, cuda, "cuMemUnmap", address, size_bytes)
            access, flags = cuda.CUmemAccessDesc(), cuda.CUmemAccess_flags
            access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device
            both, read = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            access.flags = both if writable else read
            _call(cuda, "cuMemSetAccess", address, size_bytes, [access], 1)
            self._handle, self._undo = handle, undo.pop_all()

    @classmethod
    def create(cls, size_bytes: int, device: int) -> DescriptorMemory:
        """Allocate ``size_bytes``, rounded down to the device's granularity. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        supported = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        if not _call(cuda, "cuDeviceGetAttribute", supported, _call(cuda, "cuDeviceGet", device)):
            raise CudaUnavailable("the device does not share memory by file descriptors")
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = _descriptors(cuda)
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = device
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(_call(cuda, "cuMemGetAllocationGranularity", wanted, minimum))
        size_bytes = max(step, size_bytes // step * step)
        handle = _call(cuda, "cuMemCreate", size_bytes, wanted, 0)
        return cls(cuda, device, size_bytes, handle, context, uuid, writable=True)

    @classmethod
    def imported(cls, descriptor: int, size_bytes: int, device: int) -> DescriptorMemory:
        """Import another process's memory for reading; the caller closes the descriptor. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        handle = _call(cuda, "cuMemImportFromShareableHandle", descriptor, _descriptors(cuda))
        return cls(cuda, device, size_bytes, handle, context, uuid, writable=False)

    def descriptor(self) -> int:
        """Export a new file descriptor, which the caller closes. Raises CudaUnavailable."""
        return int(_call(self._cuda, "cuMemExportToShareableHandle", self._handle, _descriptors(self._cuda), 0))

    def close(self) -> None:
        self._undo.close()


class LegacyMemory(SharedDeviceMemory):
    """Device memory shared by a ``cuIpc`` handle. Made by ``create`` or ``imported``."""

    def __init__(self, cuda: Any, context: Any, uuid: bytes, address: int, size_bytes: int, own: bool) -> None:
        super().__init__(cuda, context, uuid, address, size_bytes)
        self._own = own

    @classmethod
    def create(cls, size_bytes: int, device: int) -> LegacyMemory:
        """Allocate memory. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        memory = cls(cuda, context, uuid, int(_call(cuda, "cuMemAlloc", size_bytes)), size_bytes, own=True)
        memory.handle()  # if this fails, fail now and not when a worker attaches
        return memory

    @classmethod
    def imported(cls, handle: bytes, size_bytes: int, device: int) -> LegacyMemory:
        """Import another process's memory. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        given = cuda.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, HANDLE_BYTES)
        lazily = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(_call(cuda, "cuIpcOpenMemHandle", given, int(lazily)))
        return cls(cuda, context, uuid, address, size_bytes, own=False)

    def handle(self) -> bytes:
        """Return the handle that another process opens. Raises CudaUnavailable."""
        return ctypes.string_at(_call(self._cuda, "cuIpcGetMemHandle", self.address).getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        _call(self._cuda, "cuMemFree" if self._own else "cuIpcCloseMemHandle", self.address)


def device_uuid(device: int) -> bytes:
    """Return the 16 bytes that identify a device in every process. Raises CudaUnavailable."""
    return _begin(device)[2]


def _begin(device: int) -> tuple[Any, Any, bytes]:
    """Return the driver, a device's primary context (made current), and its UUID."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable("it needs cuda-bindings: pip install 'kvsidecar[gpu]'") from error
    cuda: Any = driver
    _call(cuda, "cuInit", 0)
    handle = _call(cuda, "cuDeviceGet", device)
    context = _call(cuda, "cuDevicePrimaryCtxRetain", handle)
    _call(cuda, "cuCtxSetCurrent", context)
    return cuda, context, bytes(_call(cuda, "cuDeviceGetUuid", handle).bytes)[:16]


def _descriptors(cuda: Any) -> Any:
    return cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _call(cuda: Any, name: str, *arguments: Any) -> Any:
    try:
        error, *found = getattr(cuda, name)(*arguments)
    except RuntimeError as missing:  # no driver
        raise CudaUnavailable(str(missing).splitlines()[0]) from missing
    if int(error) != 0:
        raise CudaUnavailable(f"{name} says {error.name}")
    return found[0] if found else None
