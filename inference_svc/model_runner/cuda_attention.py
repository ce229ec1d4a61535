"""Attention of a batch by our CUDA kernels.

One launch computes all sequences, and reads keys in place from scattered blocks of the pool. Kinds of batches for which
torch's attention is faster use torch's attention: ``select_cuda_attention`` times both when a worker starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from kvkernels.cuda.cuda_attention import HEAD_DIMS, AttentionRows, PagedKV, attend, shared_bytes
from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels
from kvkernels.cuda.kernel_select import fits, kernels_for, supports
from kvkernels.device.visible_devices import device_of
from torch import Tensor

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.attention import attend_segments
from inference_svc.model_runner.engine_lost import check_device
from inference_svc.model_runner.forward_batch import CudaIndex, ForwardBatch

AttentionFn = Callable[[Tensor, ForwardBatch, int, float, int | None, float | None], Tensor]
KINDS = ("decode", "prefill", "scattered")
_REPEATS = 5

log = structlog.get_logger("engine")


@dataclass(frozen=True)
class CudaAttention:
    """Our CUDA kernels, used for the given ``kinds`` of batches."""

    kernels: Kernels
    kinds: frozenset[str] = frozenset(KINDS)

    def serves(self, batch: ForwardBatch) -> bool:
        # An observer needs all scores, and our kernels never have all of them at one time.
        return batch.observer is None and kind_of(batch) in self.kinds

    def __call__(
        self, query: Tensor, batch: ForwardBatch, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Computes a layer's attention of ``query [rows, heads, dim]``, which may have padding rows. Same shape."""
        if batch.index is None:
            batch.index = build_index(batch)
        index = batch.index
        source = PagedKV(batch.pool.keys[layer], batch.pool.values[layer], index.first_slot, index.pages)
        real = query[: batch.real].contiguous()
        found, _ = attend(self.kernels, real, source, index.rows, scale, window or 0, softcap or 0.0)
        if len(found) == len(query):
            return found
        # Zeros: padding rows belong to no sequence, and their output must be finite.
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        out[: batch.real] = found
        return out


def kind_of(batch: ForwardBatch) -> str:
    if any(s.positions is not None for s in batch.segments):
        return "scattered"
    return "decode" if all(s.rows == 1 for s in batch.segments) else "prefill"


def find_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """Finds our kernels for a device; None if they do not support the type or head size."""
    if device.type != "cuda" or head_dim not in HEAD_DIMS or not supports(device, dtype):
        return None
    if not fits(device, f"attention of {head_dim} channels", shared_bytes(head_dim)):
        return None
    return kernels_for(device).kernels


def build_index(batch: ForwardBatch) -> CudaIndex:
    """Describes a batch to the kernels, which see each segment as a sequence.

    If the keys of some segment are not contiguous, each key is listed by its slot, as a kernel page of one token.
    """
    device, segments = batch.tokens.device, batch.segments

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    at = AttentionRows(
        qo_indptr=int32([*(s.first_row for s in segments), batch.real]),
        kv_lens=int32([s.keys for s in segments]),
        positions=batch.positions[: batch.real].to(torch.int32),
        max_q_len=max(s.rows for s in segments),
        max_kv_len=max(s.keys for s in segments),
    )
    first = [s.first_slot for s in segments]
    if None not in first:
        return CudaIndex(at, int32([f for f in first if f is not None]), None)
    pages = torch.zeros(len(segments), at.max_kv_len, dtype=torch.int32, device=device)
    for line, segment in zip(pages, segments, strict=True):
        if segment.slots is not None:
            line[: segment.keys] = segment.slots[: segment.keys]
        elif segment.first_slot is not None:
            there = torch.arange(segment.first_slot, segment.first_slot + segment.keys, device=device)
            line[: segment.keys] = there.clamp_min(0)  # released keys are behind the window: the kernel skips them
    return CudaIndex(at, None, pages)


def select_cuda_attention(pool: KVPool, kernels: Kernels, heads: int, keys: int = 4096) -> CudaAttention:
    """Selects the kinds of batches for which our kernels beat torch's attention.

    Compares the median times of a few calls over ``keys`` keys of an empty pool. Writes nothing to the pool.
    """
    ours = CudaAttention(kernels)
    keys = min(keys, pool.free_pages * PAGE_TOKENS)
    table = pool.allocate(keys)
    if table is None or keys < 2:
        return ours
    try:
        scattered = np.unique(np.linspace(0, keys - 1, min(keys, 512)).astype(np.int64))
        spans = {
            "decode": forward_batch.SequenceSlice([0], keys - 1, table, False),
            "prefill": forward_batch.SequenceSlice([0] * min(keys, 512), keys - min(keys, 512), table, False),
            "scattered": forward_batch.SequenceSlice([0] * len(scattered), 0, table, False, scattered),
        }
        won = set()
        for kind, span in spans.items():
            batch = forward_batch.build_batch([span], pool, pool.keys.device)
            query = torch.randn(
                len(batch.tokens), heads, pool.keys.shape[3], dtype=pool.keys.dtype, device=pool.keys.device
            )
            try:
                if _seconds(ours, query, batch) <= _seconds(attend_segments, query, batch):
                    won.add(kind)
            except KernelLaunchError as error:
                check_device(pool.keys.device, error)
                log.warning("a kernel cannot be launched, torch computes instead", kind=kind, reason=str(error))
    finally:
        pool.free(table)
    return CudaAttention(kernels, frozenset(won))


def _seconds(way: AttentionFn, query: Tensor, batch: ForwardBatch) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        way(query, batch, 0, query.shape[2] ** -0.5, None, None)
        if query.is_cuda:
            device_of(query.device).synchronize()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))
