"""Forward batch: the packed rows of several sequences, input of one step.

A row is ``(token, position, sequence, slot)``. The forward writes the row's key and value to its slot of the pool; the
row's query sees the keys of its sequence with ``key position <= row position``. Prefill, chunked prefill, decode,
verification of draft tokens and selective recompute are the same forward with different rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from kvkernels.device.visible_devices import device_of
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.kv_pool.block_table import KEY_BLOCK, UNMAPPED, BlockTable, KeyRanges
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.model_runner.lora_batch import LoraRows
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE

if TYPE_CHECKING:
    from kvkernels.cpu.cpu_attention import Attention
    from kvkernels.cuda.cuda_attention import AttentionRows

# Rows per segment. Longer segments need fewer calls; shorter ones read fewer keys that the mask hides.
SEGMENT_ROWS = 128
# A device's kernels skip the keys that a causal mask hides. For windows and soft caps, masks have this height.
DEVICE_SEGMENT_ROWS = 1024


@dataclass(frozen=True)
class Branch:
    """Branch of a draft tree: ``tokens`` at positions from ``start`` on.

    The sampled rows of a slice are numbered. Row 0 is the slice's last sampled or prompt token, then come the rows of
    the slice's own draft tokens, then the rows of its branches. The branch has the rows from ``first`` on and follows
    row ``behind``. ``table`` maps all keys that the branch sees. The branch owns the block in which it begins and the
    blocks after that block. ``copied`` has ``(row, slot)`` pairs: the keys and values of these earlier rows of the step
    are also written to these slots, which are in the branch's blocks.
    """

    tokens: list[int]
    start: int
    behind: int
    first: int
    table: BlockTable
    copied: tuple[tuple[int, int], ...] = ()
    adapter: LoraAdapter | None = None

    @property
    def end(self) -> int:
        """End of the branch's rows, exclusive."""
        return self.first + len(self.tokens)


@dataclass(eq=False, slots=True)
class SequenceSlice:
    """Tokens of one sequence to compute in a step.

    The tokens have the positions from ``start`` on, or the ascending ``positions``. ``table`` must contain the keys and
    values of all earlier positions. The step computes logits for the first ``num_scored`` tokens. With ``wants_logits``
    it also computes logits for the last token. The last ``num_drafted`` tokens are draft tokens. If there are any, the
    step computes logits for the draft tokens, for the token before them, and for all tokens of ``branches``.

    Not frozen, because each step makes one for every sequence, and a frozen class takes three times as long to make.
    """

    tokens: list[int]
    start: int
    table: BlockTable
    wants_logits: bool
    positions: NDArray[np.int64] | None = None
    gate: LayerReadyEvent | None = None  # set while keys and values of earlier positions are being loaded
    num_drafted: int = 0
    adapter: LoraAdapter | None = None  # its products are added to the model's
    num_scored: int = 0
    branches: tuple[Branch, ...] = ()

    @property
    def end(self) -> int:
        """End of the positions, exclusive."""
        return self.start + len(self.tokens) if self.positions is None else int(self.positions[-1]) + 1

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens, including branches."""
        on_branches = sum(len(branch.tokens) for branch in self.branches) if self.branches else 0
        return self.num_drafted + on_branches

    def following(self, row: int) -> dict[int, int]:
        """Maps each draft token that may follow a sampled row to the draft token's row."""
        found: dict[int, int] = {}
        if row < self.num_drafted:
            found[self.tokens[len(self.tokens) - self.num_drafted + row]] = row + 1
        for branch in self.branches:
            if branch.behind == row:
                found[branch.tokens[0]] = branch.first
            elif branch.first <= row < branch.end - 1:
                found[branch.tokens[row + 1 - branch.first]] = row + 1
        return found

    def branch_of(self, row: int) -> Branch | None:
        """Branch that a row belongs to; None for the slice's own draft tokens."""
        return next((branch for branch in self.branches if branch.first <= row < branch.end), None)

    def without_drafts(self) -> SequenceSlice:
        return replace(self, tokens=self.tokens[: len(self.tokens) - self.num_drafted], num_drafted=0, branches=())

    def all_positions(self) -> Sequence[int]:
        return range(self.start, self.end) if self.positions is None else _listed(self.positions)

    def slots(self) -> Sequence[int]:
        """Pool slots of the tokens' keys and values."""
        if self.positions is not None:
            return _listed(self.table.slots(0, self.end)[self.positions])
        first = self.table.first_slot
        if first is not None:
            return range(first + self.start, first + self.end)
        return _listed(self.table.slots(self.start, self.end))


def _listed(numbers: NDArray[np.int64]) -> list[int]:
    found: list[int] = numbers.tolist()
    return found


@dataclass(eq=False)
class Segment:
    """Rows of one slice and their keys; at most SEGMENT_ROWS, or DEVICE_SEGMENT_ROWS on a device.

    The rows see ``keys`` keys. Attention computes with ``padded`` keys, of which a mask hides the additional ones.
    ``ranges`` has the slots of the keys if they are in at most two ranges and all rows see the whole first one.
    """

    first_row: int
    rows: int
    start: int
    positions: Tensor | None  # [rows] if they are not consecutive from start on
    keys: int
    padded: int
    first_slot: int | None
    slots: Tensor | None  # [padded] if the slots of the keys are not contiguous
    left: int = 0  # leading keys whose blocks were released; no row sees them
    adapter: LoraAdapter | None = None
    ranges: KeyRanges | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CudaIndex:
    """Rows and key locations of a batch, or of a part of it, on a CUDA device; the same for all layers.

    ``rows`` are the batch's rows from ``first_row`` to ``end_row`` (None: the last). ``copied`` is the range of slots
    whose keys and values are copied to device memory before each layer's attention, which then sees the copy. With
    ``prefix``, ``rows`` and ``first_slot`` describe the keys behind the prefixes.
    """

    rows: AttentionRows
    first_slot: Tensor | None
    pages: Tensor | None
    first_row: int = 0
    end_row: int | None = None
    copied: slice | None = None
    prefix: PrefixIndex | None = None


@dataclass(frozen=True)
class PrefixIndex:
    """Prefixes of a part of a batch; to the kernels, all rows with the same prefix are one sequence."""

    rows: AttentionRows
    first_slot: Tensor


@dataclass(frozen=True)
class SlotCopies:
    """Additional slots to which keys and values of rows are written.

    ``lines [copies, rows]`` has the slot of each copy, or UNMAPPED where a row has no further copy.
    """

    lines: Tensor

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Rows ``[n]`` and slots ``[n]`` of all copies."""
        found = (self.lines != UNMAPPED).nonzero()
        return found[:, 1], self.lines[found[:, 0], found[:, 1]]


@dataclass(eq=False)
class ForwardBatch:
    """Input of one forward. ``rows`` is a multiple of ROW_MULTIPLE; the last rows may be padding."""

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows]
    segments: list[Segment]
    logit_rows: Tensor  # [wanted, padded to ROW_MULTIPLE]
    wanted: int
    real: int  # rows that are not padding
    pool: KVPool
    contiguous_slots: tuple[int, int] | None  # first slot and number of real rows, if their slots are contiguous
    project_only: bool = False  # the layer ends when its keys and values are written
    observer: AttentionObserver | None = None
    # Inputs of our CUDA kernels and of our CPU kernel, made at their first use.
    index: tuple[CudaIndex, ...] = ()
    attention: Attention | None = None
    gates: tuple[LayerReadyEvent, ...] = ()
    adapted: tuple[LoraRows, ...] = ()
    copies: SlotCopies | None = None

    def pass_layer(self, layer: int) -> None:
        """Waits until a layer is loaded for all sequences of the batch. Raises LayerLoadFailed.

        On a device, the current stream waits instead of the thread.
        """
        for gate in self.gates:
            ready = gate.pass_layer(layer)
            if ready is not None:
                device_of(self.pool.keys.device).current_stream().wait(ready)


class AttentionObserver(Protocol):
    """Receives attention probabilities of a batch with one segment, layer by layer."""

    def see(self, strongest: Tensor) -> None:
        """Receives ``strongest [heads, keys]``: the maximum over all rows of each key's probability.

        Padding keys may follow the last key.
        """
        ...


def build_batch(spans: list[SequenceSlice], pool: KVPool, device: torch.device) -> ForwardBatch:
    """Packs slices into a batch.

    Each slice's table must have slots for its tokens and contain all keys that its rows see.
    """
    tokens: list[int] = []
    slots, positions, segments = list[int](), list[int](), list[Segment]()
    logit_rows: list[int] = []
    copied: list[tuple[int, int]] = []
    for span in spans:
        segments.extend(_segments(span, len(tokens), pool, device))
        slots += span.slots()
        positions += span.all_positions()
        logit_rows.extend(range(len(tokens), len(tokens) + span.num_scored))
        tokens.extend(span.tokens)
        if span.wants_logits:
            drawn_from = len(tokens) - 1 - span.num_drafted
            for branch in span.branches:
                part = SequenceSlice(branch.tokens, branch.start, branch.table, True, adapter=branch.adapter)
                segments.extend(_segments(part, len(tokens), pool, device))
                slots += part.slots()
                positions += part.all_positions()
                tokens.extend(branch.tokens)
                copied.extend((drawn_from + row, slot) for row, slot in branch.copied)
            logit_rows.extend(range(drawn_from, len(tokens)))
    real = len(tokens)
    padding = -real % ROW_MULTIPLE
    tokens.extend([0] * padding)
    slots += [pool.padding_slot] * padding
    positions += [0] * padding
    wanted = len(logit_rows)
    logit_rows.extend([0] * (-wanted % ROW_MULTIPLE))
    alone = len(spans) == 1 and spans[0].positions is None and not spans[0].branches
    piece = spans[0].table.first_slot if alone else None
    return ForwardBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        segments=segments,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        wanted=wanted,
        real=real,
        pool=pool,
        contiguous_slots=None if piece is None else (piece + spans[0].start, real),
        gates=tuple(span.gate for span in spans if span.gate is not None and not span.gate.complete),
        adapted=_adapted(segments, real),
        copies=_copies(copied, len(tokens), device),
    )


def _copies(copied: list[tuple[int, int]], rows: int, device: torch.device) -> SlotCopies | None:
    """Builds SlotCopies from ``(row, slot)`` pairs; a row may occur more than once."""
    if not copied:
        return None
    ordered, line, lines = sorted(copied), 0, [[UNMAPPED] * rows]
    for (before, _), (row, slot) in pairwise([(-1, UNMAPPED), *ordered]):
        line = line + 1 if row == before else 0
        if line == len(lines):
            lines.append([UNMAPPED] * rows)
        lines[line][row] = slot
    return SlotCopies(torch.tensor(lines, dtype=torch.int64, device=device))


def keep_logit_rows(batch: ForwardBatch) -> ForwardBatch:
    """Reduces a batch to the rows that need logits, with one segment per row."""
    wanted, segments = batch.logit_rows[: batch.wanted].tolist(), []
    for at, row in enumerate(wanted):
        whole = next(s for s in batch.segments if s.first_row <= row < s.first_row + s.rows)
        position = int(batch.positions[row])
        padded = pad_keys(position + 1)
        slots = None if whole.slots is None else whole.slots[:padded]
        end, first = position + 1, whole.first_slot
        segments.append(
            Segment(at, 1, position, None, end, padded, first, slots, whole.left, whole.adapter, whole.ranges)
        )
    return replace(
        batch,
        tokens=batch.tokens[batch.logit_rows],
        positions=batch.positions[batch.logit_rows],
        slots=batch.slots[batch.logit_rows],
        segments=segments,
        logit_rows=torch.arange(len(batch.logit_rows), device=batch.logit_rows.device),
        real=batch.wanted,
        contiguous_slots=None,
        copies=None,  # the layer's projections have already written them
        index=(),
        attention=None,
        adapted=_adapted(segments, batch.wanted),
    )


def _adapted(segments: list[Segment], real: int) -> tuple[LoraRows, ...]:
    """Returns the contiguous row ranges of each adapter. ``real``: rows of the batch without padding."""
    found: list[LoraRows] = []
    for segment in segments:
        if segment.adapter is None:
            continue
        first, end = segment.first_row, segment.first_row + segment.rows
        if found and found[-1].adapter is segment.adapter and found[-1].end == first:
            first = found.pop().first
        alone = end - first == real
        found.append(LoraRows(segment.adapter, first, end, None if alone else -(end - first) % ROW_MULTIPLE))
    return tuple(found)


def pad_keys(keys: int) -> int:
    """Rounds a number of keys up to KEY_BLOCK: torch's kernel then gives a row the same bits in any batch."""
    return -(-keys // KEY_BLOCK) * KEY_BLOCK


def _segments(span: SequenceSlice, first_row: int, pool: KVPool, device: torch.device) -> list[Segment]:
    """Splits a slice into segments of at most SEGMENT_ROWS rows, or DEVICE_SEGMENT_ROWS on a device.

    Each sees the keys up to its last position.
    """
    out, first_slot = [], span.table.first_slot
    ranges = pool.ranges_behind(span.table, span.start if span.positions is None else int(span.positions[0]))
    most = SEGMENT_ROWS if device.type == "cpu" else DEVICE_SEGMENT_ROWS
    for at in range(0, len(span.tokens), most):
        count = min(most, len(span.tokens) - at)
        part = None if span.positions is None else span.positions[at : at + count]
        keys = span.start + at + count if part is None else int(part[-1]) + 1
        padded = pad_keys(keys)
        first, slots = first_slot, None
        # Attention reads the padding keys behind the sequence's end, although masked: they must be inside the pool.
        if first is None or first + padded > pool.keys.shape[2]:
            first = None
            padding = np.full(padded - keys, pool.padding_slot)
            there = span.table.slots(0, keys)
            there[there == UNMAPPED] = pool.padding_slot
            slots = torch.from_numpy(np.concatenate((there, padding))).to(device)
        positions = None if part is None else torch.from_numpy(part).to(device)
        row, start, left = first_row + at, span.start + at, span.table.num_released
        out.append(Segment(row, count, start, positions, keys, padded, first, slots, left, span.adapter, ranges))
    return out
