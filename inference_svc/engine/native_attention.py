"""Attention of a batch by our CUDA kernels: all sequences in one launch, keys read from the pool as they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvkernels.native.attention import HEAD_DIMS, InPool, Rows, attend
from kvkernels.native.library import Kernels
from kvkernels.native.select import kernels_for, takes
from torch import Tensor

from inference_svc.engine.rows import Batch


@dataclass(frozen=True)
class Index:
    """Where a batch's rows and keys are, on the device; the same for all layers."""

    rows: Rows
    first_slot: Tensor | None
    pages: Tensor | None


def kernels_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """Our kernels for a model's device, when they attend heads of its type and size."""
    if device.type != "cuda" or head_dim not in HEAD_DIMS or not takes(device, dtype):
        return None
    return kernels_for(device).kernels


def index_of(batch: Batch) -> Index:
    """Every segment is a sequence to the kernels. Keys in several pieces are named singly, as pages of one token."""
    device, segments = batch.tokens.device, batch.segments

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = Rows(
        row_start=int32([*(s.first_row for s in segments), batch.real]),
        key_count=int32([s.keys for s in segments]),
        positions=batch.positions[: batch.real].to(torch.int32),
        longest=max(s.rows for s in segments),
        most_keys=max(s.keys for s in segments),
    )
    first = [s.first_slot for s in segments]
    if None not in first:
        return Index(rows, int32([f for f in first if f is not None]), None)
    pages = torch.zeros(len(segments), rows.most_keys, dtype=torch.int32, device=device)
    for line, segment in zip(pages, segments, strict=True):
        if segment.slots is not None:
            line[: segment.keys] = segment.slots[: segment.keys]
        elif segment.first_slot is not None:
            line[: segment.keys] = torch.arange(segment.first_slot, segment.first_slot + segment.keys, device=device)
    return Index(rows, None, pages)


def attend_batch(
    kernels: Kernels,
    query: Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """``query [rows, heads, dim]`` of a batch, padding included, to output of the same shape."""
    if batch.index is None:
        batch.index = index_of(batch)
    index = batch.index
    source = InPool(batch.pool.keys[layer], batch.pool.values[layer], index.first_slot, index.pages)
    # zeros: padding rows belong to no sequence, and what they hold must be finite
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    rows = query[: batch.real].contiguous()
    out[: batch.real] = attend(kernels, rows, source, index.rows, scale, window or 0, softcap or 0.0)[0]
    return out
