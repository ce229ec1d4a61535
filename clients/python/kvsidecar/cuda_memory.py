"""CUDA device memory that processes share by a file descriptor (the driver's virtual memory management).

Needs ``cuda-bindings`` (``pip install 'kvsidecar[gpu]'``) and a driver; imports neither before it is used.
"""

from __future__ import annotations

from typing import Any


class CudaUnavailable(OSError):
    """CUDA memory cannot be had; the message says what refused."""


class SharedMemory:
    """A block of device memory mapped into this process. Made by ``create`` or ``imported``; any thread may use it."""

    def __init__(self, cuda: Any, device: int, size_bytes: int, handle: Any, context: Any, uuid: bytes) -> None:
        self._cuda, self._handle, self._context = cuda, handle, context
        self.size_bytes, self.device_uuid = size_bytes, uuid
        self.address = int(_call(cuda, "cuMemAddressReserve", size_bytes, 0, 0, 0))
        _call(cuda, "cuMemMap", self.address, size_bytes, 0, handle, 0)
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call(cuda, "cuMemSetAccess", self.address, size_bytes, [access], 1)

    @classmethod
    def create(cls, size_bytes: int, device: int) -> SharedMemory:
        """New memory, of ``size_bytes`` rounded down to what the device allocates in. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = _descriptors(cuda)
        wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = device
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(_call(cuda, "cuMemGetAllocationGranularity", wanted, minimum))
        size_bytes = max(step, size_bytes // step * step)
        handle = _call(cuda, "cuMemCreate", size_bytes, wanted, 0)
        return cls(cuda, device, size_bytes, handle, context, uuid)

    @classmethod
    def imported(cls, descriptor: int, size_bytes: int, device: int) -> SharedMemory:
        """Another process's memory; the caller closes the descriptor. Raises CudaUnavailable."""
        cuda, context, uuid = _begin(device)
        handle = _call(cuda, "cuMemImportFromShareableHandle", descriptor, _descriptors(cuda))
        return cls(cuda, device, size_bytes, handle, context, uuid)

    def descriptor(self) -> int:
        """A new file descriptor of the memory, which the caller closes."""
        return int(_call(self._cuda, "cuMemExportToShareableHandle", self._handle, _descriptors(self._cuda), 0))

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """A copy on the host."""
        _call(self._cuda, "cuCtxSetCurrent", self._context)  # of this thread
        out = bytearray(size_bytes)
        _call(self._cuda, "cuMemcpyDtoH", out, self.address + offset, size_bytes)
        return memoryview(out)

    def write(self, offset: int, data: memoryview) -> None:
        """Copies from the host, and returns when it is done."""
        _call(self._cuda, "cuCtxSetCurrent", self._context)
        _call(self._cuda, "cuMemcpyHtoD", self.address + offset, bytes(data), len(data))

    def close(self) -> None:
        """Lets go of the memory. Nobody in this process may be using it."""
        _call(self._cuda, "cuMemUnmap", self.address, self.size_bytes)
        _call(self._cuda, "cuMemAddressFree", self.address, self.size_bytes)
        _call(self._cuda, "cuMemRelease", self._handle)


def device_uuid(device: int) -> bytes:
    """The 16 bytes that name a device in every process. Raises CudaUnavailable."""
    return _begin(device)[2]


def _begin(device: int) -> tuple[Any, Any, bytes]:
    """The driver, a device's primary context (current now), and its UUID."""
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
