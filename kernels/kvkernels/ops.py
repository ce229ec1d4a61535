"""Torch custom operators ``torch.ops.kvkernels.attention`` and ``torch.ops.kvkernels.awq_gemm``.

Each runs our CUDA kernel if the device has one, and otherwise its plain-torch reference with the same arguments. Fake
kernels give shapes, so that both can be traced, compiled and captured. Importing this module registers them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkernels.cuda import awq_gemm as awq
from kvkernels.cuda.cuda_attention import HEAD_DIMS, AttentionRows, PagedKV, attend, shared_bytes
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import fits, kernels_for, supports


def has_cuda_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if our CUDA kernels support a device and a dtype."""
    return device.type == "cuda" and supports(device, dtype) and kernels_for(device).kernels is not None


def find_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return our CUDA kernels for a device and a dtype, or None."""
    return kernels_for(device).kernels if has_cuda_kernels(device, dtype) else None


def find_attention_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """Return our CUDA kernels if they also support heads of ``head_dim`` channels on this device, or None."""
    kernels = find_kernels(device, dtype)
    if kernels is None or head_dim not in HEAD_DIMS:
        return None
    return kernels if fits(device, f"attention of {head_dim} channels", shared_bytes(head_dim)) else None


@torch.library.custom_op("kvkernels::attention", mutates_args=())
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    max_q_len: int,
    max_kv_len: int,
    sm_scale: float,
    sliding_window: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention over a paged pool.

    Returns the output ``[rows, heads, dim]`` and the log-sum-exp ``[rows, heads]``. ``query [rows, heads, dim]``;
    ``keys``, ``values [kv_heads, slots, dim]``; int32 ``qo_indptr [sequences + 1]``, ``kv_lens [sequences]``,
    ``positions [rows]`` (a row attends to its sequence's keys up to its own position), ``kv_slots [sequences,
    max_kv_len]``, the pool slot of each key. ``max_q_len``: rows of the longest sequence. ``sliding_window``: keys that
    a row attends to, its own included. 0 disables ``sliding_window`` and ``logits_soft_cap``. The log-sum-exp is
    float32, natural. Names follow FlashInfer.
    """
    kernels = find_attention_kernels(query.device, query.dtype, query.shape[2])
    if kernels is None:
        return attention_reference(
            query,
            keys,
            values,
            qo_indptr,
            kv_lens,
            positions,
            kv_slots,
            max_q_len,
            max_kv_len,
            sm_scale,
            sliding_window,
            logits_soft_cap,
        )
    rows = AttentionRows(qo_indptr, kv_lens, positions, max_q_len, max_kv_len)
    return attend(
        kernels,
        query.contiguous(),
        PagedKV(keys, values, pages=kv_slots),
        rows,
        sm_scale,
        sliding_window,
        logits_soft_cap,
    )


def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    max_q_len: int,
    max_kv_len: int,
    sm_scale: float,
    sliding_window: int,
    logits_soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Compute ``attention`` by definition, in float32: the test oracle."""
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], float("-inf"), device=query.device)
    group = query.shape[1] // keys.shape[0]
    starts = qo_indptr.tolist()
    for sequence, count in enumerate(kv_lens.tolist()):
        part, where = slice(starts[sequence], starts[sequence + 1]), kv_slots[sequence, :count]
        k, v = (x.index_select(1, where).float().repeat_interleave(group, 0) for x in (keys, values))
        scores = torch.einsum("rhd,hkd->hrk", query[part].float(), k) * sm_scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        key, row = torch.arange(count, device=query.device)[None], positions[part, None]
        hidden = key > row
        if sliding_window:
            hidden = hidden | (key <= row - sliding_window)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.nan_to_num(torch.softmax(scores, -1))  # rows without a visible key
        output[part] = torch.einsum("hrk,hkd->rhd", weights, v).to(query.dtype)
        lse[part] = scores.logsumexp(-1).t()
    return output, lse


@attention.register_fake
def _(query: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvkernels::awq_gemm", mutates_args=())
def awq_gemm(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Multiply ``x [rows, in]`` by 4-bit AWQ weights: ``[rows, out]``.

    The weights come from ``awq_gemm.repack``: ``codes`` int32 ``[in / 16, out / 64, 32, 4]``, ``scales`` and
    ``zeros [in / group, out]``.
    """
    weights = awq.AwqWeights(codes, scales, zeros, group)
    kernels = find_kernels(x.device, x.dtype)
    return x @ awq.dequantize_reference(weights).t() if kernels is None else awq.gemm(kernels, x, weights)


@awq_gemm.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])
