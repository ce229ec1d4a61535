"""A forward's input: rows of several sequences, packed.

A row is ``(token, position, sequence, slot)``. Its key and value are written to the pool at its slot; its query
sees the keys of its sequence with ``key position <= row position``. Prefill, chunked prefill and decode are the
same forward with different rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inference_svc.engine.pool import KEY_BLOCK, BlockTable, KVPool

# Matrix kernels give a row the same bits in every batch whose row count is a multiple of this.
ROW_MULTIPLE = 4


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence to be computed: ``tokens`` at positions from ``start``."""

    tokens: list[int]
    start: int
    table: BlockTable
    wants_logits: bool


@dataclass(eq=False)
class Segment:
    """The rows of one span inside a batch and the keys they see (``keys`` of them, padded to ``padded``)."""

    first_row: int
    rows: int
    start: int
    keys: int
    padded: int
    first_slot: int | None
    slots: Tensor | None  # [padded] when the keys do not lie in one piece
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Batch:
    """One forward. ``rows`` is a multiple of ROW_MULTIPLE; the last ones may be padding."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    segments: list[Segment]
    logit_rows: Tensor  # [wanted, padded to ROW_MULTIPLE]
    wanted: int
    real: int  # rows that are not padding
    pool: KVPool
    contiguous_slots: tuple[int, int] | None  # first slot and rows, when all real rows lie in one piece


def build(spans: list[Span], pool: KVPool, device: torch.device) -> Batch:
    """Packs spans into a batch. Each span's pages must hold its tokens."""
    tokens: list[int] = []
    slots, positions, segments, logit_rows = [], [], [], []
    for span in spans:
        count, end = len(span.tokens), span.start + len(span.tokens)
        segments.append(_segment(span, len(tokens), count, end, pool, device))
        slots.append(span.table.slots(span.start, end))
        positions.append(np.arange(span.start, end))
        tokens.extend(span.tokens)
        if span.wants_logits:
            logit_rows.append(len(tokens) - 1)
    real = len(tokens)
    padding = -real % ROW_MULTIPLE
    tokens.extend([0] * padding)
    slots.append(np.full(padding, pool.padding_slot))
    positions.append(np.zeros(padding, np.int64))
    wanted = len(logit_rows)
    logit_rows.extend([0] * (-wanted % ROW_MULTIPLE))
    piece = segments[0].first_slot if len(spans) == 1 else None
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        segments=segments,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        wanted=wanted,
        real=real,
        pool=pool,
        contiguous_slots=None if piece is None else (piece + spans[0].start, real),
    )


def _segment(span: Span, first_row: int, rows: int, keys: int, pool: KVPool, device: torch.device) -> Segment:
    padded = -(-keys // KEY_BLOCK) * KEY_BLOCK
    first = span.table.first_slot
    slots = None
    # Keys behind the sequence's end are read, though masked: they must at least be inside the pool.
    if first is None or first + padded > pool.keys.shape[2]:
        first = None
        padding = np.full(padded - keys, pool.padding_slot)
        slots = torch.from_numpy(np.concatenate((span.table.slots(0, keys), padding))).to(device)
    return Segment(first_row, rows, span.start, keys, padded, first, slots)
