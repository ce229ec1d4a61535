"""Interface that launches CUDA kernels by name: fat library, NVRTC module or CPU emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from kvkernels.device.visible_devices import device_of, is_device


class KernelLaunchError(RuntimeError):
    """Failed kernel launch; the message names the kernel and the reason."""


class Kernels(Protocol):
    """Launcher of kernels by name. ``params`` is copied before ``launch`` returns."""

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Enqueue a kernel on a stream (0: the default one). Raises KernelLaunchError."""
        ...

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        """Return True if the kernel exists and takes this parameter struct."""
        ...


class SharedLibrary:
    """C interface of ``kernels/cuda/launch.cu`` and of the emulator. Raises OSError when it does not load."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        self._c.kvk_launch.argtypes = [
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint * 3),
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._c.kvk_params_bytes.argtypes, self._c.kvk_params_bytes.restype = [ctypes.c_char_p], ctypes.c_size_t
        self._c.kvk_error_string.argtypes, self._c.kvk_error_string.restype = [ctypes.c_int], ctypes.c_char_p

    @property
    def devices(self) -> int:
        """Number of usable devices, or the negative CUDA error (-35: no driver)."""
        return int(self._c.kvk_devices())

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the library's sources; empty for a library that does not tell it."""
        return self._text("kvk_fingerprint")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return True if the library has machine code for a device, or PTX that the driver compiles for it."""
        built = [divmod(int(number), 10) for number in self.architectures.split("_") if number]
        same = any(major == capability[0] and minor <= capability[1] for major, minor in built)
        return same or (bool(built) and capability >= built[-1])

    @property
    def architectures(self) -> str:
        """Architectures of the library's machine code, such as ``80_90``."""
        return self._text("kvk_architectures")

    def _text(self, function: str) -> str:
        found = getattr(self._c, function, None)
        if found is None:
            return ""
        found.restype = ctypes.c_char_p
        return str(found().decode())

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        return int(self._c.kvk_params_bytes(name.encode())) == ctypes.sizeof(params)

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        size = (ctypes.c_uint * 3)(*grid)
        error = self._c.kvk_launch(name.encode(), size, threads, shared_bytes, ctypes.byref(params), stream)
        if error:
            raise KernelLaunchError(f"{name} on a grid of {tuple(grid)}: {self._c.kvk_error_string(error).decode()}")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return a tensor's address for a parameter, None for no tensor.

    The caller keeps the tensor alive until the kernel has run; on a single stream, torch's allocator does.
    """
    return None if tensor is None else tensor.data_ptr()


def stream_of(tensor: torch.Tensor) -> int:
    """Return the handle of the current stream on the tensor's device."""
    return device_of(tensor.device).current_stream().handle if is_device(tensor.device) else 0


def type_name(dtype: torch.dtype) -> str:
    """Return the kernels' name of a dtype. Raises ValueError for a dtype without tensor-core support."""
    names = {torch.float16: "f16", torch.bfloat16: "bf16"}
    if dtype not in names:
        raise ValueError(f"dtype is {dtype}; kernels take torch.float16 and torch.bfloat16")
    return names[dtype]
