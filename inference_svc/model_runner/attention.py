"""Attention of packed rows over the KV pool, for ``transformers.AttentionInterface``.

The batch takes the place of the attention mask: every supported model passes the mask to its layers unchanged.

Batch invariance (CPU): a row's output must not depend on the other rows of its batch, because a cache hit would then
change the answer. Our kernels guarantee this. Without them, torch's attention is used. On a CPU it gives a row the same
bits if the number of query rows is a multiple of 4 and the number of keys is a multiple of 512 (its key block). This
module pads both numbers; masked keys contribute exact zeros. In short segments, the query heads that share a key head
are packed into rows: seven such heads and one padding row read the keys once instead of seven times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kvsidecar.errors import ModelUnsupported
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from inference_svc.model_runner import cpu_attention
from inference_svc.model_runner.forward_batch import ForwardBatch, Segment
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE

# With more rows than this, the mask for packed heads costs more than the packing saves.
PACK_ROWS = 128


class ProjectionDone(Exception):
    """Ends a layer of a ``project_only`` batch after its projections."""


def _keys_values(batch: ForwardBatch, segment: Segment, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[kv_heads, padded, head_dim]`` of a segment; a view if their slots are contiguous."""
    keys, values = batch.pool.keys[layer], batch.pool.values[layer]
    if segment.first_slot is not None and not segment.left:
        end = segment.first_slot + segment.padded
        return keys[:, segment.first_slot : end], values[:, segment.first_slot : end]
    if segment.slots is None:
        assert segment.first_slot is not None
        segment.slots = torch.arange(segment.padded, device=keys.device) + segment.first_slot
        segment.slots[: segment.left] = batch.pool.padding_slot  # every mask hides these keys, and they are finite
    return keys.index_select(1, segment.slots), values.index_select(1, segment.slots)


def segment_mask(segment: Segment, group: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask ``[rows * group, padded keys]``, with rows padded to ROW_MULTIPLE; built once per forward."""
    found = segment.masks.get((group, window))
    if found is not None:
        return found
    rows = segment.rows * group
    height = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if segment.rows == 1 and segment.positions is None:
        mask = torch.zeros(height, segment.padded, dtype=like.dtype, device=like.device)
        mask[:, segment.keys :] = float("-inf")
        if window is not None:
            mask[:, : max(0, segment.keys - window)] = float("-inf")
    else:
        mask = _rows_mask(segment, window, like)
        if group > 1:
            mask = mask.repeat_interleave(group, 0)
        if height > rows:
            mask = torch.cat((mask, mask[-1:].expand(height - rows, -1)))
    segment.masks[group, window] = mask
    return mask


def _rows_mask(segment: Segment, window: int | None, like: Tensor) -> Tensor:
    """Additive mask ``[rows, padded keys]``."""
    mask = torch.zeros(segment.rows, segment.padded, dtype=like.dtype, device=like.device)
    # If the segment's rows are consecutive and no window hides keys, all rows see the keys before ``first``.
    first = segment.start + 1 if segment.positions is None and window is None else 0
    key = torch.arange(first, segment.padded, device=like.device)
    if segment.positions is None:
        row = torch.arange(segment.start, segment.start + segment.rows, device=like.device)[:, None]
    else:
        row = segment.positions[:, None]
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    mask[:, first:].masked_fill_(hidden, float("-inf"))
    return mask


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: Segment,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Computes torch's attention of one segment: ``query [rows, heads, dim]`` to output of the same shape."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if query.is_cuda and segment.positions is None and window is None and softcap is None and not segment.left:
        return _attend_causal(query, keys[:, : segment.keys], values[:, : segment.keys], scale)
    keys, values = keys[None], values[None]
    packed = group > 1 and rows <= PACK_ROWS
    if packed:
        q = query.view(rows, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, rows * group, dim)
        mask = segment_mask(segment, group, window, query)
    else:
        q = query.transpose(0, 1)
        mask = segment_mask(segment, 1, window, query)
    extra = mask.shape[0] - q.shape[1]
    if extra:
        q = F.pad(q, (0, 0, 0, extra))
    if softcap is None:
        out = F.scaled_dot_product_attention(
            q[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=not packed and group > 1
        )[0]
    else:
        out = _soft_capped(q[None], keys, values, mask, scale, softcap, 1 if packed else group)[0]
    if packed:
        return out[:, : rows * group].reshape(kv_heads, rows, group, dim).permute(1, 0, 2, 3).reshape(rows, heads, dim)
    return out[:, :rows].transpose(0, 1)


def _attend_causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Computes attention of the last rows of a sequence by PyTorch's kernels without a mask in memory."""
    q, k, v, several = query.transpose(0, 1)[None], keys[None], values[None], len(query) > 1
    mask: Any = causal_lower_right(len(query), keys.shape[1]) if several else None
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _soft_capped(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, group: int
) -> Tensor:
    """Computes attention with ``softcap * tanh(scores / softcap)`` (Gemma 2) in float32, like the eager model."""
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(torch.softmax(scores, -1), values.float()).to(q.dtype)


def attend_rows(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ForwardBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: writes keys and values to the pool, then attends.

    ``query [1, heads, rows, dim]``, ``key`` and ``value [1, kv_heads, rows, dim]``; returns ``[1, rows, heads, dim]``.
    """
    batch, layer = attention_mask, module.layer_idx
    windows = batch.pool.windows
    if windows and windows[layer] != sliding_window:
        raise ModelUnsupported(
            f"layer {layer} attends over {sliding_window or 'all'} keys, where {windows[layer] or 'all'} were expected"
        )
    _scatter(batch, batch.pool.keys[layer], key[0])
    _scatter(batch, batch.pool.values[layer], value[0])
    if batch.project_only:
        raise ProjectionDone
    rows_first = query[0].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_of(batch)(rows_first, batch, layer, scale, sliding_window, softcap)[None], None


def attention_of(batch: ForwardBatch) -> Callable[..., Tensor]:
    """Chooses our kernel for the pool's device, or torch's attention."""
    native = batch.pool.native
    if native is not None and native.serves(batch):
        return native
    return cpu_attention.attend if batch.pool.attends_by_pages else attend_segments


def attend_segments(
    query: Tensor, batch: ForwardBatch, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Computes torch's attention, one segment after the other.

    ``query [rows, heads, dim]`` to output of the same shape.
    """
    # Zeros: padding rows belong to no segment, and their output must be finite.
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for segment in batch.segments:
        part = slice(segment.first_row, segment.first_row + segment.rows)
        keys, values = _keys_values(batch, segment, layer)
        out[part] = _attend(query[part], keys, values, segment, scale, window, softcap)
    if batch.observer is not None:
        _observe(query, batch, layer, scale, window)
    return out


def _observe(query: Tensor, batch: ForwardBatch, layer: int, scale: float, window: int | None) -> None:
    """Computes the attention probabilities of ``query [rows, heads, dim]`` for the batch's observer."""
    assert batch.observer is not None
    (segment,) = batch.segments
    keys, _ = _keys_values(batch, segment, layer)
    (kv_heads, count, dim), rows_, heads = keys.shape, segment.rows, query.shape[1]
    # Query heads that share a key head are rows of one matrix product.
    mine = query[segment.first_row : segment.first_row + rows_].transpose(0, 1)
    scores = (mine.reshape(kv_heads, -1, dim) @ keys.transpose(1, 2)).view(heads, rows_, count).float()
    scores = scores.mul_(scale).add_(segment_mask(segment, 1, window, query)[:rows_])
    batch.observer.see(torch.softmax(scores, -1).amax(1))


def _scatter(batch: ForwardBatch, pool: Tensor, rows: Tensor) -> None:
    if batch.contiguous_slots is not None:
        first, count = batch.contiguous_slots
        pool[:, first : first + count] = rows[:, :count]
    else:
        pool.index_copy_(1, batch.slots, rows)
    if batch.copies is not None:
        copied, slots = batch.copies.flat
        pool.index_copy_(1, slots, rows.index_select(1, copied))


def register() -> None:
    """Registers the attention function with transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, attend_rows)
