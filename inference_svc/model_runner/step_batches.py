"""Step batches: the forward batches of successive steps, of which one differs little from the next."""

from __future__ import annotations

import torch

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import ForwardBatch, Segment, SequenceSlice, build_batch, pad_keys


class StepBatches:
    """Builds the batch of each step. One thread at a time.

    While the same sequences decode, only tokens, positions and slots change between steps. On a CPU, the last batch is
    then changed in place, and keeps its prepared attention until a sequence begins a new block. For a small model,
    building both anew would take 3 % of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: ForwardBatch | None = None
        self._tables: list[BlockTable] = []

    def next(self, slices: list[SequenceSlice], pool: KVPool) -> ForwardBatch:
        """Returns the batch of the slices, as ``build_batch``; it is valid until the next call."""
        last = self._last
        if last is not None and self._continues(last, slices, pool):
            _advance(last, slices)
            return last
        batch = build_batch(slices, pool, self._device)
        kept = self._device.type == "cpu" and not batch.gates and all(map(_decodes, slices))
        self._last, self._tables = (batch, [one.table for one in slices]) if kept else (None, [])
        return batch

    def _continues(self, last: ForwardBatch, slices: list[SequenceSlice], pool: KVPool) -> bool:
        """True if each slice is the next token of the last batch's slice."""
        if last.pool is not pool or len(slices) != len(self._tables):
            return False
        end = pool.keys.shape[2]
        return all(
            one.table is table and _decodes(one) and _follows(segment, one, end)
            for one, table, segment in zip(slices, self._tables, last.segments, strict=True)
        )


def _decodes(one: SequenceSlice) -> bool:
    """True if a slice is the next token of an answer, without draft tokens."""
    simple = one.positions is None and not one.num_scored and not one.branches
    loaded = one.gate is None or one.gate.complete
    return simple and loaded and one.wants_logits and len(one.tokens) == 1


def _follows(segment: Segment, one: SequenceSlice, end: int) -> bool:
    """True if a slice's token follows a segment's, and attention reads its keys in place from a pool of ``end`` slots.

    The keys must have stayed at their slots.
    """
    first, table = segment.first_slot, one.table
    if first is None or table.first_slot != first or table.num_released != segment.left:
        return False
    return one.start == segment.start + 1 and one.adapter is segment.adapter and first + pad_keys(one.end) <= end


def _advance(batch: ForwardBatch, slices: list[SequenceSlice]) -> None:
    """Changes a batch of decoding sequences to their next tokens."""
    count = batch.real
    batch.tokens.numpy()[:count] = [one.tokens[0] for one in slices]
    batch.positions.numpy()[:count] += 1
    batch.slots.numpy()[:count] += 1
    batch.index = ()
    for segment in batch.segments:
        segment.start += 1
        segment.keys += 1
        segment.padded = pad_keys(segment.keys)
        segment.slots = None
        segment.masks.clear()
        if segment.start % PAGE_TOKENS == 0:
            batch.attention = None
    if batch.contiguous_slots is not None:
        first, rows = batch.contiguous_slots
        batch.contiguous_slots = first + 1, rows
