"""Kernels by name, wherever their code is: a fat library, an NVRTC module, the CPU emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch


class KernelFailed(RuntimeError):
    """A launch was refused; the message names the kernel and the reason."""


class Kernels(Protocol):
    """Something that launches kernels. ``params`` is copied before ``launch`` returns."""

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        """Enqueues a kernel on a stream (0: the default one). Raises KernelFailed."""
        ...

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        """Whether there is such a kernel, taking such parameters."""
        ...


class SharedLibrary:
    """The C interface of ``kernels/cuda/launch.cu``, the emulator's as well. Raises OSError when it does not load."""

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
        """Devices that can be used, or the negative CUDA error: -35 where there is no driver."""
        return int(self._c.kvk_devices())

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        return int(self._c.kvk_params_bytes(name.encode())) == ctypes.sizeof(params)

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        size = (ctypes.c_uint * 3)(*grid)
        error = self._c.kvk_launch(name.encode(), size, threads, shared_bytes, ctypes.byref(params), stream)
        if error:
            raise KernelFailed(f"{name} on a grid of {tuple(grid)}: {self._c.kvk_error_string(error).decode()}")


def pointer(tensor: torch.Tensor | None) -> int | None:
    """A tensor's address, for a parameter; null for none. The caller keeps the tensor alive until the kernel has run,
    which on one stream torch's allocator sees to."""
    return None if tensor is None else tensor.data_ptr()


def stream_of(tensor: torch.Tensor) -> int:
    """The stream that torch currently enqueues on, for the tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream) if tensor.is_cuda else 0


def type_name(dtype: torch.dtype) -> str:
    """The name that kernels have for an element type. Raises ValueError for a type without tensor cores."""
    names = {torch.float16: "f16", torch.bfloat16: "bf16"}
    if dtype not in names:
        raise ValueError(f"dtype is {dtype}; kernels take torch.float16 and torch.bfloat16")
    return names[dtype]
