"""The elementwise parts of a decoder layer on the CPU, fused: norm, rotation with scatter, gated activation.

A row's bits do not depend on what else is in the batch. Rounding follows the eager model: to the tensors' type after
the normalization and after the activation, float32 inside. All tensors are contiguous and of one type, float32 or
bfloat16, but for weights and angles, which are float32. Functions give the call that does it, for ``run`` or a chain
(``kernels/cpu/rows.cpp``), and raise RuntimeError without kernels.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import Call, Kernel, found

# Below this many rows handing work to another thread costs more than it saves.
_PARALLEL_ROWS = 48
_POINTER = ctypes.c_void_p


def _fields(numbers: str, pointers: str, *rest: tuple[str, type]) -> tuple[tuple[str, type], ...]:
    return (
        *((name, ctypes.c_int64) for name in numbers.split()),
        *((name, _POINTER) for name in pointers.split()),
        *rest,
    )


class _Norm(ctypes.Structure):
    _fields_ = _fields("taken rows of_bf16 width", "hidden delta weight out", ("epsilon", ctypes.c_double))


class _Rotate(ctypes.Structure):
    _fields_ = _fields(
        "taken rows of_bf16 heads kv_heads dim",
        "qkv cosine sine q_weight k_weight slots again",
        *((name, ctypes.c_int64) for name in ("copies", "copy_rows")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("head_size", ctypes.c_int64),
        ("queries", _POINTER),
        ("epsilon", ctypes.c_double),
    )


class _Gate(ctypes.Structure):
    _fields_ = _fields("taken rows of_bf16 width", "gate_up out")


@cache
def _kernel(name: str, job: type[ctypes.Structure]) -> Kernel:
    library = found().library
    if library is None:
        raise RuntimeError(found().why)
    return library.kernel(name, job)


def run(call: Call, rows: int) -> None:
    """A call of this module over so many rows, on as many threads as that is worth."""
    call.together(1 if rows < _PARALLEL_ROWS else torch.get_num_threads())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def norm(rows: int, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> Call:
    """Adds ``delta`` (if any) to ``hidden [>= rows, width]`` in place and writes its RMS norm times ``weight [width]``
    to ``out``."""
    job = _Norm(
        0,
        rows,
        hidden.dtype == torch.bfloat16,
        hidden.shape[1],
        hidden.data_ptr(),
        _address(delta),
        weight.data_ptr(),
        out.data_ptr(),
        epsilon,
    )
    return Call(_kernel("norm", _Norm), job, (hidden, delta, weight, out))


def rotate(
    rows: int,
    qkv: Tensor,
    kv_heads: int,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    slots: Tensor,
    pool: tuple[Tensor, Tensor],
    queries: Tensor,
    again: Tensor | None = None,
) -> Call:
    """Rotates queries and keys of ``qkv [>= rows, (heads + 2 kv_heads) * dim]`` by ``angles``, cosines and sines
    ``[rows, dim]``, after an RMS norm per head where ``norms`` has weights ``[dim]`` for queries and keys. Writes keys
    and values to a layer of the pool ``[kv_heads, slots, dim]`` at int64 ``slots [rows]``, and the same
    to those of ``again [copies, >= rows]`` that are not below 0; queries to ``queries [>= rows, heads, dim]``."""
    keys, values = pool
    copies, copy_rows = (0, 0) if again is None else again.shape
    job = _Rotate(
        0,
        rows,
        qkv.dtype == torch.bfloat16,
        queries.shape[1],
        kv_heads,
        queries.shape[2],
        qkv.data_ptr(),
        angles[0].data_ptr(),
        angles[1].data_ptr(),
        _address(norms[0]),
        _address(norms[1]),
        slots.data_ptr(),
        _address(again),
        copies,
        copy_rows,
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        queries.data_ptr(),
        epsilon,
    )
    return Call(_kernel("rotate", _Rotate), job, (qkv, angles, norms, slots, again, keys, values, queries))


def gate(rows: int, gate_up: Tensor, out: Tensor) -> Call:
    """``out [>= rows, width] = silu(gate_up[:, :width]) * gate_up[:, width:]``."""
    job = _Gate(0, rows, out.dtype == torch.bfloat16, out.shape[1], gate_up.data_ptr(), out.data_ptr())
    return Call(_kernel("gate", _Gate), job, (gate_up, out))
