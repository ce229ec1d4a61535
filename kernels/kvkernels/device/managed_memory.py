"""Managed memory of CUDA: one range of addresses whose parts are placed on a device or on the host.

The driver's own choice would move pages at faults. With a preferred location, pages stay where they are, and the device
accesses those of the host over its link (CUDA C++ Programming Guide, "Unified Memory", data usage hints).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from kvkernels.device.device_port import DeviceLacks

_ATTACH_GLOBAL = 1
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5  # CUmem_advise
_HOST = -1  # CU_DEVICE_CPU
_CONCURRENT_MANAGED_ACCESS = 89  # CUdevice_attribute
_OUT_OF_MEMORY = 2


class ManagedMemory:
    """``size_bytes`` of managed memory for the device ``ordinal``, whose context must be current.

    The memory is freed with the object; torch's tensors on it keep the object. Raises DeviceLacks,
    torch.OutOfMemoryError.
    """

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        try:
            self._c = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceLacks(f"there is no CUDA driver: {error}") from error
        self._size, address, context = size_bytes, ctypes.c_uint64(), ctypes.c_void_p()
        self._device, able = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._call("cuDeviceGetAttribute", ctypes.byref(able), _CONCURRENT_MANAGED_ACCESS, self._device)
        if not able.value:
            raise DeviceLacks("its kernels cannot use managed memory on the host (concurrentManagedAccess)")
        self._call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size_bytes), _ATTACH_GLOBAL)
        self.address = address.value
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        # At the end of the process, the driver frees the memory, and the context may be gone.
        weakref.finalize(self, _free, self._c, context, address).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Description for torch (version 3 of the interface)."""
        return {"shape": (self._size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def keep_on_device(self, offset: int, size_bytes: int) -> None:
        """Place a part in device memory, at once."""
        self._advise(offset, size_bytes, _PREFERRED_LOCATION, self._device)
        at, size = ctypes.c_uint64(self.address + offset), ctypes.c_size_t(size_bytes)
        self._call("cuMemPrefetchAsync", at, size, self._device, None)

    def keep_on_host(self, offset: int, size_bytes: int) -> None:
        """Place a part in host memory, when it is first written. The device accesses it there."""
        self._advise(offset, size_bytes, _PREFERRED_LOCATION, ctypes.c_int(_HOST))
        self._advise(offset, size_bytes, _ACCESSED_BY, self._device)

    def _advise(self, offset: int, size_bytes: int, advice: int, device: ctypes.c_int) -> None:
        at, size = ctypes.c_uint64(self.address + offset), ctypes.c_size_t(size_bytes)
        self._call("cuMemAdvise", at, size, advice, device)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._c, name)(*arguments)
        if error == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: {self._size} bytes of managed memory are not free")
        if error:
            text = ctypes.c_char_p()
            self._c.cuGetErrorString(error, ctypes.byref(text))
            raise DeviceLacks(f"{name}: {(text.value or b'error').decode()} (CUDA driver, {error})")


def _free(driver: ctypes.CDLL, context: ctypes.c_void_p, address: ctypes.c_uint64) -> None:
    """Free memory on any thread, whose own context does not change."""
    if driver.cuCtxPushCurrent_v2(context) == 0:
        driver.cuMemFree_v2(address)
        driver.cuCtxPopCurrent_v2(None)
