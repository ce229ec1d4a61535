"""Fused elementwise kernels of a decoder layer on the CPU.

They are RMS norm, RoPE with KV scatter, and SiLU gate. A row's bits do not depend on the batch. Rounding follows the
eager model: to the tensors' dtype after the normalization and after the activation; float32 in between. All tensors are
contiguous and of one dtype, float32 or bfloat16, except weights and angles, which are float32. Each function returns a
KernelCall, for ``run`` or a KernelGraph (``kernels/cpu/norm_rope_silu.cpp``), and raises RuntimeError without kernels.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import KernelCall, loaded_kernel

# Below this many rows, waking other threads costs more than it saves.
_PARALLEL_ROWS = 48
_POINTER = ctypes.c_void_p


def _fields(numbers: str, pointers: str, *rest: tuple[str, type]) -> tuple[tuple[str, type], ...]:
    return (
        *((name, ctypes.c_int64) for name in numbers.split()),
        *((name, _POINTER) for name in pointers.split()),
        *rest,
    )


class _RmsNormJob(ctypes.Structure):
    _fields_ = _fields("next_item rows of_bf16 width", "hidden delta weight out", ("epsilon", ctypes.c_double))


class _RopeJob(ctypes.Structure):
    _fields_ = _fields(
        "next_item rows of_bf16 heads kv_heads dim",
        "qkv cosine sine q_weight k_weight slots copy_slots",
        *((name, ctypes.c_int64) for name in ("copies", "copy_rows")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("kv_head_stride", ctypes.c_int64),
        ("queries", _POINTER),
        ("epsilon", ctypes.c_double),
    )


class _SiluJob(ctypes.Structure):
    _fields_ = _fields("next_item rows of_bf16 width", "gate_up out")


def run(call: KernelCall, rows: int) -> None:
    """Run a call of this module over ``rows`` rows.

    Uses one thread or torch's OpenMP team.
    """
    call.run(1 if rows < _PARALLEL_ROWS else torch.get_num_threads())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rms_norm(
    rows: int, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor
) -> KernelCall:
    """Add ``delta`` to ``hidden`` in place and write its RMS norm to ``out``.

    ``hidden`` is ``[>= rows, width]``; ``delta`` may be None. The norm is multiplied by ``weight [width]``.
    """
    job = _RmsNormJob(
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
    return KernelCall(loaded_kernel("rms_norm", _RmsNormJob), job, (hidden, delta, weight, out))


def rope(
    rows: int,
    qkv: Tensor,
    kv_heads: int,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    slots: Tensor,
    pool: tuple[Tensor, Tensor],
    queries: Tensor,
    copy_slots: Tensor | None = None,
) -> KernelCall:
    """Apply RoPE to queries and keys of ``qkv``, and scatter KV into the pool.

    ``qkv`` is ``[>= rows, (heads + 2 kv_heads) * dim]``. ``angles`` are cosines and sines ``[rows, dim]``. If ``norms``
    has weights ``[dim]`` for queries and keys, each head is RMS-normalized first. Keys and values are written to a
    layer of the pool ``[kv_heads, slots, dim]`` at int64 ``slots [rows]``, and again at each non-negative slot of
    ``copy_slots [copies, >= rows]``; queries are written to ``queries [>= rows, heads, dim]``.
    """
    keys, values = pool
    copies, copy_rows = (0, 0) if copy_slots is None else copy_slots.shape
    job = _RopeJob(
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
        _address(copy_slots),
        copies,
        copy_rows,
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        queries.data_ptr(),
        epsilon,
    )
    return KernelCall(
        loaded_kernel("rope", _RopeJob), job, (qkv, angles, norms, slots, copy_slots, keys, values, queries)
    )


def silu_and_mul(rows: int, gate_up: Tensor, out: Tensor) -> KernelCall:
    """Compute ``out [>= rows, width] = silu(gate_up[:, :width]) * gate_up[:, width:]``."""
    job = _SiluJob(0, rows, out.dtype == torch.bfloat16, out.shape[1], gate_up.data_ptr(), out.data_ptr())
    return KernelCall(loaded_kernel("silu_and_mul", _SiluJob), job, (gate_up, out))
