"""CUDA driver API: modules and launches bound to a device's primary context.

torch uses the same context. The first call creates the context, on any thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvkernels.cuda.cuda_library import KernelLaunchError

_DEFAULT_SHARED_BYTES = 48 << 10
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class PrimaryContext:
    """Primary context of a device ordinal. Raises OSError without a driver, KernelLaunchError without the device."""

    def __init__(self, ordinal: int) -> None:
        self.c = ctypes.CDLL("libcuda.so.1")
        self._context, device, where = ctypes.c_void_p(), ctypes.c_int(), f"cuda:{ordinal}"
        self.check(where, self.c.cuInit(0))
        self.check(where, self.c.cuDeviceGet(ctypes.byref(device), ordinal))
        self.check(where, self.c.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread while the ``with`` block runs. Raises KernelLaunchError."""
        self.check("the context", self.c.cuCtxPushCurrent_v2(self._context))
        try:
            yield
        finally:
            self.c.cuCtxPopCurrent_v2(None)

    def check(self, what: str, error: int) -> None:
        """Raise KernelLaunchError for an error of the driver."""
        if error:
            text = ctypes.c_char_p()
            self.c.cuGetErrorString(error, ctypes.byref(text))
            raise KernelLaunchError(f"{what}: {(text.value or b'error').decode()} (CUDA driver, {error})")


class CubinModule:
    """Kernels of cubins on one device, launched there from any thread.

    Raises OSError without a driver, KernelLaunchError if the driver rejects the code.
    """

    def __init__(self, cubins: Sequence[bytes], ordinal: int) -> None:
        self._context = PrimaryContext(ordinal)
        self._modules, self._functions = [ctypes.c_void_p() for _ in cubins], dict[str, tuple[ctypes.c_void_p, int]]()
        with self._context.current():
            for module, cubin in zip(self._modules, cubins, strict=True):
                self._context.check("the kernels", self._context.c.cuModuleLoadData(ctypes.byref(module), cubin))

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        with self._context.current():
            return self._find(name) is not None

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        context = self._context
        with context.current():
            function, allowed = self._functions.get(name, (None, _DEFAULT_SHARED_BYTES))
            if function is None:
                function = self._find(name)
            if function is None:
                raise KernelLaunchError(f"{name}: the module has no such kernel")
            if shared_bytes > allowed:
                error = context.c.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
                context.check(f"{name} with {shared_bytes} bytes of shared memory", error)
            self._functions[name] = function, max(allowed, shared_bytes)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            block = (threads, 1, 1, shared_bytes)
            error = context.c.cuLaunchKernel(function, *grid, *block, ctypes.c_void_p(stream), arguments, None)
            context.check(f"{name} on a grid of {tuple(grid)}", error)

    def _find(self, name: str) -> ctypes.c_void_p | None:
        for module in self._modules:
            found = ctypes.c_void_p()
            if int(self._context.c.cuModuleGetFunction(ctypes.byref(found), module, name.encode())) == 0:
                return found
        return None
