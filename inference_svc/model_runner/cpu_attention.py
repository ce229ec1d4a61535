"""Attention of a batch by our CPU kernel.

One call computes all sequences, and reads keys in place from scattered blocks of the pool.
"""

from __future__ import annotations

import numpy as np
import torch
from kvkernels.cpu import cpu_attention
from kvkernels.cpu.cpu_attention import Attention
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.model_runner.forward_batch import ForwardBatch, Segment

assert PAGE_TOKENS == cpu_attention.PAGE


def prepare_attention(
    batch: ForwardBatch, heads: int, softcap: float | None = None, *, at_once: bool = False
) -> Attention:
    """Prepares the attention of all layers of a batch, which use the same blocks.

    With ``at_once``, the batch's observer gets the probabilities of all layers after the last one, by ``report``.
    """
    beyond = batch.pool.padding_slot
    rows = [cpu_attention.SequenceRows(s.first_row, s.rows, _pages(s, beyond)) for s in batch.segments]
    pool = batch.pool
    recorded = 0 if batch.observer is None else len(pool.keys) if at_once else 1
    return Attention(batch.positions.numpy(), rows, heads, (pool.keys, pool.values), softcap, recorded)


def attend_in_place(attention: Attention, batch: ForwardBatch, layer: int, scale: float, window: int | None) -> None:
    """Computes a layer's attention between the tensors that ``attention`` is bound to.

    Reports the strongest probabilities to the batch's observer, if it has one.
    """
    attention(layer, scale, window)
    report(attention, batch)


def report(attention: Attention, batch: ForwardBatch) -> None:
    """Reports the strongest probabilities of the recorded layers to the batch's observer, if it has one."""
    if batch.observer is not None:
        for strongest in attention.max_probs():
            batch.observer.see(torch.from_numpy(strongest))


def attend(
    query: Tensor, batch: ForwardBatch, layer: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Computes a layer's attention: ``query [rows, heads, dim]``, with padding, to output of the same shape."""
    if batch.attention is None:
        batch.attention = prepare_attention(batch, query.shape[1], softcap)
    query = query.contiguous()
    # Zeros: padding rows belong to no sequence, and their output must be finite.
    out = torch.zeros_like(query)
    batch.attention.bind(query, out)
    attend_in_place(batch.attention, batch, layer, scale, window)
    return out


def _pages(segment: Segment, beyond: int) -> NDArray[np.int64]:
    """Returns the first slot of each block of a segment's keys, padded to whole units of the kernel.

    Padding and released blocks have the slot ``beyond``, the pool's padding, because the kernel multiplies the values
    there by zero. Values of another sequence may be NaN, and NaN times zero is NaN.
    """
    tokens = cpu_attention.num_pages(segment.keys) * PAGE_TOKENS
    if segment.first_slot is not None:
        pages = np.arange(segment.first_slot, segment.first_slot + tokens, PAGE_TOKENS)
        pages[-(-segment.keys // PAGE_TOKENS) :] = beyond
        pages[: segment.left // PAGE_TOKENS] = beyond
        return pages
    assert segment.slots is not None
    return segment.slots.numpy()[:tokens:PAGE_TOKENS]
