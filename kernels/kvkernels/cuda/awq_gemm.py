"""GEMM with AutoAWQ's 4-bit weights on CUDA: repacking, reference, launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkernels.awq_layout import unpack_columns
from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name
from kvkernels.device.visible_devices import device_of, is_device

_THREADS = 128
MAX_ROWS = 16
GROUPS = (32, 64, 128)


class _AwqParams(ctypes.Structure):
    """``AwqParams`` in cuda/awq_gemm.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("input", "weights", "scales", "zeros", "output", "parts")),
        *((n, ctypes.c_int) for n in ("rows", "in_", "out", "group", "splits", "reserved")),
    )


@dataclass(frozen=True)
class AwqWeights:
    """Repacked weights of a linear layer.

    ``codes`` int32 ``[in / 16, out / 64, 32, 4]`` (see cuda/awq_gemm.cu), ``scales`` and ``zeros``
    ``[in / group, out]``.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    @property
    def inputs(self) -> int:
        return int(self.codes.shape[0]) * 16

    @property
    def outputs(self) -> int:
        return int(self.codes.shape[1]) * 64


def repack(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> AwqWeights:
    """Repack a layer for the kernels, once. Raises ValueError for an unsupported shape."""
    inputs, outputs = qweight.shape[0], qweight.shape[1] * 8
    group = inputs // scales.shape[0]
    if group not in GROUPS or inputs % group or outputs % 64:
        raise ValueError(
            f"the layer is {inputs} x {outputs} in groups of {group}; kernels take groups of "
            f"{', '.join(map(str, GROUPS))} that divide the inputs, and outputs in multiples of 64"
        )
    codes = unpack_columns(qweight).to(torch.int64)
    # [k tile, half of 8 rows, t, pair] x [n block, w, n tile of w, g]
    parts = codes.view(inputs // 16, 2, 4, 2, outputs // 64, 4, 2, 8)
    halves, pairs, tiles = (torch.arange(2, device=codes.device) for _ in range(3))
    shift = (4 * halves)[:, None, None] + (16 * pairs)[None, :, None] + (8 * tiles)[None, None, :]
    words = (parts << shift.view(1, 2, 1, 2, 1, 1, 2, 1)).sum((1, 3, 6))  # [k tile, t, n block, w, g]
    words = words.permute(0, 2, 4, 1, 3).reshape(inputs // 16, outputs // 64, 32, 4)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return AwqWeights(words.contiguous(), scales.contiguous(), unpack_columns(qzeros).to(scales.dtype), group)


def dequantize_reference(weights: AwqWeights) -> Tensor:
    """Dequantize repacked weights to ``[out, in]`` in plain torch."""
    words = weights.codes.view(*weights.codes.shape[:2], 8, 4, 4).permute(0, 1, 4, 2, 3)  # [k tile, n block, w, g, t]
    shift = torch.arange(0, 16, 4, device=words.device)  # [n tile of w, half of 8 rows]
    pair = torch.tensor([0, 16], device=words.device)
    codes = (words[..., None, None] >> (shift[:, None] + pair)) & 15  # [.., n tile and half, pair]
    codes = codes.reshape(*codes.shape[:-2], 2, 2, 2)  # [k tile, n block, w, g, t, n tile, half, pair]
    codes = codes.permute(1, 2, 5, 3, 0, 6, 4, 7).reshape(weights.outputs, weights.inputs).to(weights.scales.dtype)
    scales, zeros = (x.t().repeat_interleave(weights.group, 1) for x in (weights.scales, weights.zeros))
    return (codes - zeros) * scales


def _params(weights: AwqWeights, **more: object) -> _AwqParams:
    return _AwqParams(
        weights=pointer(weights.codes),
        scales=pointer(weights.scales),
        zeros=pointer(weights.zeros),
        in_=weights.inputs,
        out=weights.outputs,
        group=weights.group,
        **more,
    )


def gemm(kernels: Kernels, x: Tensor, weights: AwqWeights, splits: int | None = None) -> Tensor:
    """Multiply ``x [rows, in]`` by the weights: ``[rows, out]``.

    Up to 16 rows take one pass over the packed weights. For more rows, weights are dequantized and torch multiplies.
    """
    x = x.contiguous()
    rows = x.shape[0]
    if rows > MAX_ROWS:
        return x @ dequantize(kernels, weights).t()
    if splits is None:
        processors = device_of(x.device).facts.multiprocessors if is_device(x.device) else 1
        splits = max(1, min(-(-4 * processors // (weights.outputs // 64)), weights.inputs // 256))
    output = torch.empty(rows, weights.outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(splits, rows, weights.outputs, device=x.device) if splits > 1 else None
    params = _params(weights, input=pointer(x), output=pointer(output), parts=pointer(parts), rows=rows, splits=splits)
    name, stream = type_name(x.dtype), stream_of(x)
    kernels.launch(f"awq_gemm_{name}", (weights.outputs // 64, splits, 1), _THREADS, 4 * 16 * 64 * 4, params, stream)
    if splits > 1:
        kernels.launch(f"awq_sum_{name}", (-(-output.numel() // _THREADS), 1, 1), _THREADS, 0, params, stream)
    return output


def dequantize(kernels: Kernels, weights: AwqWeights) -> Tensor:
    """Dequantize the weights to ``[out, in]`` on the device."""
    output = torch.empty(weights.outputs, weights.inputs, dtype=weights.scales.dtype, device=weights.scales.device)
    params = _params(weights, output=pointer(output), splits=1)
    grid = (weights.outputs // 64, -(-weights.inputs // 64), 1)
    name = type_name(output.dtype)
    kernels.launch(f"awq_dequantize_{name}", grid, _THREADS, 0, params, stream_of(output))
    return output
