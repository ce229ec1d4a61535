"""Our kernels as torch operators: ``torch.ops.kvkernels.attention`` and ``torch.ops.kvkernels.awq_gemm``.

Each runs by our CUDA kernels where a device has them, and by its reference in plain torch elsewhere, with the same
arguments; fake kernels give shapes, so that both can be traced, compiled and captured. Importing this module registers
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkernels.cuda import awq_gemm as awq
from kvkernels.cuda.cuda_attention import HEAD_DIMS, InPool, Rows, attend
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import kernels_for, takes


def has_cuda_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our CUDA kernels serve a device and a type."""
    return device.type == "cuda" and takes(device, dtype) and kernels_for(device).kernels is not None


def _kernels(x: Tensor) -> Kernels | None:
    return kernels_for(x.device).kernels if has_cuda_kernels(x.device, x.dtype) else None


@torch.library.custom_op("kvkernels::attention", mutates_args=())
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_start: Tensor,
    key_count: Tensor,
    positions: Tensor,
    slots: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of rows over a paged pool: output ``[rows, heads, dim]`` and log-sum-exp ``[rows, heads]`` (float32).

    ``query [rows, heads, dim]``; ``keys``, ``values [kv_heads, slots, dim]``; int32 ``row_start [sequences + 1]``,
    ``key_count [sequences]``, ``positions [rows]`` (a row sees its sequence's keys up to its own), ``slots [sequences,
    most_keys]`` of each key. ``longest``: rows of the longest sequence. ``window`` and ``softcap`` 0: none.
    """
    kernels = _kernels(query) if query.shape[2] in HEAD_DIMS else None
    if kernels is None:
        return attention_reference(
            query, keys, values, row_start, key_count, positions, slots, longest, most_keys, scale, window, softcap
        )
    rows = Rows(row_start, key_count, positions, longest, most_keys)
    return attend(kernels, query.contiguous(), InPool(keys, values, pages=slots), rows, scale, window, softcap)


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_start: Tensor,
    key_count: Tensor,
    positions: Tensor,
    slots: Tensor,
    longest: int,
    most_keys: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The same by definition, in float32."""
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], float("-inf"), device=query.device)
    group = query.shape[1] // keys.shape[0]
    starts = row_start.tolist()
    for sequence, count in enumerate(key_count.tolist()):
        part, where = slice(starts[sequence], starts[sequence + 1]), slots[sequence, :count]
        k, v = (x.index_select(1, where).float().repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("rhd,hkd->hrk", query[part].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        key, row = torch.arange(count, device=query.device)[None], positions[part, None]
        hidden = key > row
        if window:
            hidden = hidden | (key <= row - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.nan_to_num(torch.softmax(scores, -1))  # a row that sees nothing
        output[part] = torch.einsum("hrk,hkd->rhd", weights, v).to(query.dtype)
        lse[part] = scores.logsumexp(-1).t()
    return output, lse


@attention.register_fake
def _(query: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvkernels::awq_gemm", mutates_args=())
def awq_gemm(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """``x [rows, in]`` times 4-bit weights, ``[rows, out]``. The weights are those of ``awq.repack``: ``codes`` int32
    ``[in / 16, out / 64, 32, 4]``, ``scales`` and ``zeros [in / group, out]``."""
    weights = awq.AwqWeights(codes, scales, zeros, group)
    kernels = _kernels(x)
    return x @ awq.unpacked(weights).t() if kernels is None else awq.gemm(kernels, x, weights)


@awq_gemm.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])
