"""Row kernels of a decoder layer on CUDA: norm, RoPE and SiLU gates."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name

_MAX_NORM_THREADS, _ROPE_WARPS, _SILU_THREADS = 256, 4, 256
_WARP, _ELEMENTS = 32, 8  # elements that a thread accesses at a time
MAX_HEAD_DIM = 256


class _NormParams(ctypes.Structure):
    """``NormParams`` in cuda/layer_rows.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("hidden", "delta", "weight", "output")),
        *((n, ctypes.c_int) for n in ("rows", "width", "threads")),
        ("epsilon", ctypes.c_float),
    )


class _RopeParams(ctypes.Structure):
    """``RopeParams`` in cuda/layer_rows.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("qkv", "cosine", "sine", "query_norm", "key_norm", "slots")),
        *((n, ctypes.c_void_p) for n in ("queries", "keys", "values")),
        ("head_stride", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("rows", "heads", "kv_heads", "dim")),
        ("epsilon", ctypes.c_float),
        ("reserved", ctypes.c_int),
    )


class _SiluParams(ctypes.Structure):
    """``SiluParams`` in cuda/layer_rows.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("gate_up", "output")),
        ("rows", ctypes.c_int64),
        *((n, ctypes.c_int) for n in ("inner", "reserved")),
    )


def supports(width: int, inner: int, head_dim: int) -> bool:
    """Return True if the kernels support a layer's widths, which they access 8 elements at a time."""
    return width % _ELEMENTS == 0 and inner % _ELEMENTS == 0 and head_dim % 4 == 0 and head_dim <= MAX_HEAD_DIM


def add_norm(
    kernels: Kernels, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, output: Tensor
) -> None:
    """Enqueue ``hidden += delta`` and the RMSNorm of the sum into ``output``, all ``[rows, width]``.

    ``weight [width]`` is float32. All tensors are contiguous.
    """
    rows, width = hidden.shape
    threads = min(_MAX_NORM_THREADS, -(-width // _ELEMENTS // _WARP) * _WARP)
    params = _NormParams(
        hidden=pointer(hidden),
        delta=pointer(delta),
        weight=pointer(weight),
        output=pointer(output),
        rows=rows,
        width=width,
        threads=threads,
        epsilon=epsilon,
    )
    shared = 4 * _MAX_NORM_THREADS // _WARP
    kernels.launch(f"add_norm_{type_name(hidden.dtype)}", (rows, 1, 1), threads, shared, params, stream_of(hidden))


def rope(
    kernels: Kernels,
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    epsilon: float,
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Enqueue the rotation of queries and keys, and the write of keys and values to a layer of the pool.

    ``qkv [rows, (heads + 2 kv_heads) * dim]``; cosines and sines ``[rows, dim]`` in its dtype; float32 ``norms [dim]``
    of query and key heads, or None; ``slots`` int64 ``[rows]``. Writes ``queries [rows, heads, dim]``, and row ``i`` to
    slot ``slots[i]`` of ``keys`` and ``values [kv_heads, slots, dim]``, which have the same strides.
    """
    (rows, heads, dim), kv_heads = queries.shape, keys.shape[0]
    params = _RopeParams(
        qkv=pointer(qkv),
        cosine=pointer(angles[0]),
        sine=pointer(angles[1]),
        query_norm=pointer(norms[0]),
        key_norm=pointer(norms[1]),
        slots=pointer(slots),
        queries=pointer(queries),
        keys=pointer(keys),
        values=pointer(values),
        head_stride=keys.stride(0),
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        epsilon=epsilon,
    )
    grid = (rows, -(-(heads + 2 * kv_heads) // _ROPE_WARPS), 1)
    kernels.launch(f"rope_{type_name(qkv.dtype)}", grid, _ROPE_WARPS * _WARP, 0, params, stream_of(qkv))


def silu_and_mul(kernels: Kernels, gate_up: Tensor, output: Tensor) -> None:
    """Enqueue ``silu(gate) * up`` of ``gate_up [rows, 2 * inner]`` into ``output [rows, inner]``."""
    rows, inner = output.shape
    params = _SiluParams(gate_up=pointer(gate_up), output=pointer(output), rows=rows, inner=inner)
    grid = (-(-rows * inner // (_ELEMENTS * _SILU_THREADS)), 1, 1)
    kernels.launch(f"silu_and_mul_{type_name(output.dtype)}", grid, _SILU_THREADS, 0, params, stream_of(output))
