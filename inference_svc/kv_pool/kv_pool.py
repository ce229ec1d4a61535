"""KV pool: keys and values of all sequences, in reference-counted blocks.

A block has ``PAGE_TOKENS`` token slots; identifiers call it a page. A sequence gets one contiguous range of blocks if
one is free, because torch's attention reads a contiguous range in place and must gather scattered blocks. Our kernels
read scattered blocks directly. The block after the last one is for padding rows.

The pool counts the block tables that refer to each block. Tables share only whole blocks of computed tokens, and a
sequence writes only behind its computed tokens. So the copy of copy-on-write happens once, when sharing begins. If all
layers have a sliding window, the pool frees blocks behind the window; their entries in the block table stay, as
UNMAPPED.

The pool may have a disk overflow (``overflow``) for sequences larger than the pool. All blocks of such a sequence are
in the overflow, and blocks of no other sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from kvkernels.cpu import cpu_attention
from kvsidecar.range_allocator import RangeAllocator
from numpy.typing import NDArray

from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS, UNMAPPED, BlockTable
from inference_svc.kv_pool.disk_overflow import DiskOverflow
from inference_svc.kv_pool.pool_memory import populate, zeros

# Blocks behind a sliding window are freed in units of this many tokens: our kernels read keys in units of 64, and must
# not read a freed key.
WINDOW_STEP = 64


class DeviceAttention(Protocol):
    """Our attention kernels on a pool's device. A batch is a ``ForwardBatch``, a type of a higher layer."""

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of batches for which these kernels are faster than torch's attention."""
        ...

    def serves(self, batch: Any) -> bool: ...

    def __call__(
        self, query: torch.Tensor, batch: Any, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor: ...


class KVPool:
    """Keys and values ``[layers, kv_heads, slots, head_dim]`` of an engine's sequences.

    The keys of a head are contiguous, in the order in which attention reads them. Not thread-safe, except for the
    tensors' contents: the owner of a block table may read and write its slots from any thread.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (),
        overflow: DiskOverflow | None = None,
    ) -> None:
        """``windows``: for each layer, the number of last keys that a row sees, its own included; None for all keys.
        With an ``overflow``, which must have ``tokens`` tokens in memory, the pool uses the overflow's tensors."""
        self.windows = tuple(windows)
        # Largest window of any layer, in keys; 0 if no layer has a window.
        self.max_window = max((w for w in self.windows if w), default=0)
        # Layers without a window, in models where other layers have one.
        self.wide_layers = tuple(i for i, w in enumerate(self.windows) if not w) if self.max_window else ()
        # Our attention kernels for the pool's device, used for the batches that they serve.
        self.native: DeviceAttention | None = None
        self.pages = max(1, tokens // PAGE_TOKENS)
        self._extents = RangeAllocator(self.pages)
        self.overflow = overflow
        self._apart = None if overflow is None else RangeAllocator(overflow.pages)
        self._first_apart = self.pages if overflow is None else overflow.first_page
        self._references: NDArray[np.int32] = np.zeros(self._first_apart + self.overflow_pages, np.int32)
        self.padding_slot = self.pages * PAGE_TOKENS
        end = self.padding_slot + KEY_BLOCK
        shape = (layers, kv_heads, end, head_dim)
        if device.type != "cpu":
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            return
        if overflow is None:
            self.keys, self.values = zeros(shape, dtype), zeros(shape, dtype)
        else:
            self.keys, self.values = overflow.keys, overflow.values
        # The system makes the memory pages on a thread, before a request needs them and without delaying the start.
        populate([head for tensor in (self.keys, self.values) for layer in tensor for head in layer[:, :end]])

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, ``[kv_heads, slots, head_dim]``."""
        return list(zip(self.keys, self.values, strict=True))

    @cached_property
    def attends_by_pages(self) -> bool:
        """True if our CPU kernel serves this pool: scattered blocks then cost no more than contiguous ones."""
        return self.keys.device.type == "cpu" and cpu_attention.serves(self.keys.dtype, self.keys.shape[3])

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def free_pages(self) -> int:
        return self._extents.free_units

    @property
    def overflow_pages(self) -> int:
        return 0 if self.overflow is None else self.overflow.pages

    @property
    def free_overflow_pages(self) -> int:
        return 0 if self._apart is None else self._apart.free_units

    @property
    def window(self) -> int:
        """Largest window of any layer, in keys; 0 if some layer sees all keys."""
        return 0 if self.wide_layers else self.max_window

    @property
    def reclaims_window(self) -> bool:
        """True if blocks behind the window can be freed: no layer sees all keys, and blocks may be scattered."""
        return bool(self.window) and self.attends_by_pages

    def first_visible(self, position: int) -> int:
        """First token that windowed layers see from ``position - 1``. Rounded down to a multiple of WINDOW_STEP.

        ``position - 1``, because a request that shares a prompt computes the prompt's last token again.
        """
        return self.round_to_step(max(0, position - self.max_window)) if self.max_window else 0

    @staticmethod
    def round_to_step(tokens: int) -> int:
        """Rounds tokens down to a multiple of WINDOW_STEP, the unit of release."""
        return tokens // WINDOW_STEP * WINDOW_STEP

    def covers_window(self, table: BlockTable, tokens: int) -> bool:
        """True if a table has all keys that the row after ``tokens`` sees."""
        return table.first_valid_token <= max(0, tokens + 1 - self.max_window)

    def allocate(self, tokens: int, spare: int = 0) -> BlockTable | None:
        """Allocates blocks for ``tokens`` tokens, and for ``spare`` more if possible; None if too few are free."""
        table = BlockTable()
        pages, wanted = -(-tokens // PAGE_TOKENS), -(-(tokens + spare) // PAGE_TOKENS)
        if pages > self.free_pages:
            return None
        if self._take(table, wanted):
            return table
        self._fill(table, pages)
        return table

    def allocate_overflow(self, tokens: int) -> BlockTable | None:
        """Allocates overflow blocks for ``tokens`` tokens, without disk blocks; None if too few are free."""
        table = BlockTable(in_overflow=True)
        pages = -(-tokens // PAGE_TOKENS)
        if pages > self.free_overflow_pages:
            return None
        self._fill(table, pages)
        return table

    def reserve_disk(self, table: BlockTable, start: int, end: int) -> None:
        """Allocates disk blocks for tokens ``start`` to ``end`` of a table in the overflow. Raises OverflowFailed."""
        if self.overflow is None or not table.in_overflow:
            return
        first, last = start // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        for page, pages in table.ranges:
            a, b = max(first, 0), min(last, pages)
            if a < b and page != UNMAPPED:
                self.overflow.reserve_disk(page + a, b - a)
            first, last = first - pages, last - pages

    def allocate_contiguous(self, tokens: int) -> BlockTable | None:
        """Allocates contiguous blocks for ``tokens`` tokens; None if there is no such range."""
        table = BlockTable()
        return table if self._take(table, -(-tokens // PAGE_TOKENS)) else None

    def share(self, table: BlockTable, tokens: int) -> BlockTable:
        """Shares the whole blocks of the first ``tokens`` tokens. The new table has a reference to each."""
        shared, left = (
            BlockTable(first_valid_token=table.first_valid_token, in_overflow=table.in_overflow),
            tokens // PAGE_TOKENS,
        )
        for page, pages in table.ranges:
            take = min(pages, left)
            if take:
                shared.ranges.append((page, take))
            if take and page != UNMAPPED:
                self._references[page : page + take] += 1
            left -= take
        return shared

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Extends a table to ``tokens`` tokens in all. False, with nothing changed, if too few blocks are free."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        if missing <= 0:
            return True
        if missing > (self.free_overflow_pages if table.in_overflow else self.free_pages):
            return False
        if not table.ranges or table.ranges[-1][0] == UNMAPPED or not self._extend(table, missing):
            self._fill(table, missing)
        return True

    def grow_in_place(self, table: BlockTable, tokens: int) -> bool:
        """Extends a table like ``grow``, but only if it stays contiguous."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        return table.first_slot is not None and (missing <= 0 or self._extend(table, missing))

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Frees the blocks behind the first ``tokens`` tokens."""
        keep, kept = -(-tokens // PAGE_TOKENS), []
        for page, pages in table.ranges:
            stay = min(pages, keep)
            if stay:
                kept.append((page, stay))
            if stay < pages and page != UNMAPPED:
                self.free(BlockTable([(page + stay, pages - stay)], in_overflow=table.in_overflow))
            keep -= stay
        table.ranges[:] = kept

    def release_prefix(self, table: BlockTable, tokens: int) -> None:
        """Frees the blocks of the first ``tokens`` tokens (a multiple of WINDOW_STEP): no layer sees them again."""
        if tokens <= table.num_released:
            return
        gone, left, kept = 0, tokens // PAGE_TOKENS, list[tuple[int, int]]()
        for page, pages in table.ranges:
            go = pages if page == UNMAPPED and not kept else min(pages, max(0, left - gone))
            if go and page != UNMAPPED:
                self.free(BlockTable([(page, go)], in_overflow=table.in_overflow))
            if go < pages:
                kept.append((page + go, pages - go))
            gone += go
        table.ranges[:] = [(UNMAPPED, gone), *kept]
        table.first_valid_token = max(table.first_valid_token, gone * PAGE_TOKENS)

    def writable(self, table: BlockTable, start: int) -> bool:
        """True if no other table refers to the blocks of the tokens from ``start`` on."""
        pages = table.slots(start, table.tokens)[::PAGE_TOKENS] // PAGE_TOKENS
        return bool((self._references[pages] == 1).all())

    def copy(self, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Copies keys and values of tokens ``start`` to ``end`` between two tables."""
        if end <= start:
            return
        a, b = source.first_slot, target.first_slot
        assert start >= max(source.num_released, target.num_released), "pages are copied that are not held"
        if a is not None and b is not None:
            self.copy_slots(a + start, b + start, end - start)
        else:
            for tensor in (self.keys, self.values):
                here = torch.from_numpy(source.slots(start, end)).to(tensor.device)
                there = torch.from_numpy(target.slots(start, end)).to(tensor.device)
                tensor.index_copy_(2, there, tensor.index_select(2, here))

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copies ``count`` contiguous slots."""
        for tensor in (self.keys, self.values):
            tensor[:, :, target : target + count] = tensor[:, :, source : source + count]

    def zero_tokens(self, table: BlockTable, start: int, end: int) -> None:
        """Zeroes keys and values of tokens ``start`` to ``end``; no other table may refer to their blocks."""
        slots = torch.from_numpy(table.slots(start, end)).to(self.keys.device)
        for tensor in (self.keys, self.values):
            tensor.index_fill_(2, slots, 0)

    def free(self, table: BlockTable) -> None:
        """Drops a table's references and empties it; unreferenced blocks become free. Idempotent."""
        for page, pages in table.mapped_ranges:
            part = self._references[page : page + pages]
            part -= 1
            for first, length in _zero_runs(part):
                self._let_go(page + first, length)
        table.ranges.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is either free or referenced."""
        assert self._references.min() >= 0, "a page was freed more often than it was taken"
        for extents, first in ((self._extents, 0), (self._apart, self._first_apart)):
            if extents is not None:
                extents.check_integrity()
                held, free = np.count_nonzero(self._references[first : first + extents.capacity]), extents.free_units
                assert held + free == extents.capacity, f"{held} pages are held, {free} free of {extents.capacity}"

    def count_distinct_pages(self, tables: list[BlockTable]) -> int:
        """Number of pool blocks (without overflow) in these tables; a shared block counts once."""
        held = np.zeros(self.pages, bool)
        for table in tables:
            for page, pages in [] if table.in_overflow else table.mapped_ranges:
                held[page : page + pages] = True
        return int(held.sum())

    def count_exclusive_pages(self, table: BlockTable, also: BlockTable | None = None) -> int:
        """Number of pool blocks that freeing this table frees, if ``also`` is freed too."""
        if table.in_overflow:
            return 0
        references = self._references
        if also is not None:
            references = references.copy()
            for page, pages in also.mapped_ranges:
                references[page : page + pages] -= 1
        return sum(int((references[page : page + pages] == 1).sum()) for page, pages in table.mapped_ranges)

    def zero_exclusive(self, table: BlockTable) -> None:
        """Zeroes the blocks to which only this table refers.

        Freed blocks must be finite: attention reads behind a sequence's end and multiplies these values by zero, and
        NaN times zero is NaN. Overflow blocks read as zeros after their release.
        """
        for page, pages in [] if table.in_overflow else table.mapped_ranges:
            for first, length in _zero_runs(self._references[page : page + pages] - 1):
                start = (page + first) * PAGE_TOKENS
                for tensor in (self.keys, self.values):
                    tensor[:, :, start : start + length * PAGE_TOKENS] = 0

    def find_not_finite(self, table: BlockTable, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions (ascending) whose keys or values contain NaN or infinity."""
        if not len(positions):
            return positions
        slots = table.slots(0, int(positions[-1]) + 1)[positions]
        held = slots != UNMAPPED
        positions, at = positions[held], torch.from_numpy(slots[held]).to(self.keys.device)
        sound = torch.ones(len(positions), dtype=torch.bool, device=at.device)
        for tensor in (self.keys, self.values):
            for layer in tensor:  # copies one layer at a time, to save memory
                sound &= layer.index_select(1, at).isfinite().all(-1).all(0)
        corrupt: NDArray[np.bool_] = ~sound.cpu().numpy()
        return positions[corrupt]

    def references_match(self, tables: list[BlockTable]) -> bool:
        """True if the reference counts are those of exactly these tables."""
        counted = np.zeros_like(self._references)
        for table in tables:
            for page, pages in table.mapped_ranges:
                counted[page : page + pages] += 1
        return bool(np.array_equal(counted, self._references))

    def _take(self, table: BlockTable, pages: int) -> bool:
        """Appends one range of ``pages`` blocks to a table. False if there is no such range."""
        extents, offset = self._extents_of(table)
        found = extents.allocate(pages)
        if found is None:
            return False
        start = offset + found
        self._references[start : start + pages] = 1
        table.ranges.append((start, pages))
        return True

    def _extend(self, table: BlockTable, pages: int) -> bool:
        """Extends a table's last range by ``pages`` blocks. False if the blocks after it are not free."""
        page, held = table.ranges[-1]
        end = page + held
        extents, offset = self._extents_of(table)
        if not extents.extend(end - offset, pages):
            return False
        self._references[end : end + pages] = 1
        table.ranges[-1] = (page, held + pages)
        return True

    def _fill(self, table: BlockTable, pages: int) -> None:
        while pages:
            take = min(pages, self._extents_of(table)[0].largest_free)
            taken = self._take(table, take)
            assert taken, "fewer pages free than counted"
            pages -= take

    def _extents_of(self, table: BlockTable) -> tuple[RangeAllocator, int]:
        """Returns the allocator of a table's blocks, and the number of the allocator's first block."""
        if not table.in_overflow:
            return self._extents, 0
        assert self._apart is not None, "a table apart, and no overflow"
        return self._apart, self._first_apart

    def _let_go(self, page: int, pages: int) -> None:
        if page < self._first_apart:
            self._extents.free_part(page, pages)
        elif self._apart is not None and self.overflow is not None:
            self.overflow.release(page, pages)
            self._apart.free_part(page - self._first_apart, pages)


def _zero_runs(counts: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Returns ``(first, length)`` of each run of zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate(([1], counts, [1])) == 0))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
