"""Block allocator: free and reference-counted blocks of the KV pool.

The allocator counts the block tables that refer to each block. Tables share only whole blocks of computed tokens, and a
sequence writes only behind its computed tokens. Therefore copy-on-write copies only once, when sharing begins. If all
layers have a sliding window, blocks behind the window are freed; their entries in the block table stay, as UNMAPPED.
"""

from __future__ import annotations

import numpy as np
from kvsidecar.range_allocator import RangeAllocator
from numpy.typing import NDArray

from inference_svc.kv_pool.block_table import PAGE_TOKENS, UNMAPPED, BlockTable
from inference_svc.kv_pool.overflow import Overflow


class BlockAllocator:
    """Free and referenced blocks of a pool of ``pages`` blocks, and of its overflow."""

    def __init__(self, pages: int, overflow: Overflow | None = None) -> None:
        self.pages, self.overflow = pages, overflow
        self._extents = RangeAllocator(pages)
        self._apart = None if overflow is None else RangeAllocator(overflow.pages)
        self._first_apart = pages if overflow is None else overflow.first_page
        self._references: NDArray[np.int32] = np.zeros(self._first_apart + self.overflow_pages, np.int32)

    @property
    def free_pages(self) -> int:
        return self._extents.free_units

    @property
    def overflow_pages(self) -> int:
        return 0 if self.overflow is None else self.overflow.pages

    @property
    def first_overflow_slot(self) -> int:
        """First slot of the overflow. All slots of other blocks are before it."""
        return self._first_apart * PAGE_TOKENS

    @property
    def free_overflow_pages(self) -> int:
        return 0 if self._apart is None else self._apart.free_units

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
        """Allocates overflow blocks for ``tokens`` tokens; None if too few are free. Allocates no memory."""
        table = BlockTable(in_overflow=True)
        pages = -(-tokens // PAGE_TOKENS)
        if pages > self.free_overflow_pages:
            return None
        self._fill(table, pages)
        return table

    def allocate_contiguous(self, tokens: int) -> BlockTable | None:
        """Allocates contiguous blocks for ``tokens`` tokens; None if there is no such range."""
        table = BlockTable()
        return table if self._take(table, -(-tokens // PAGE_TOKENS)) else None

    def reserve_overflow(self, table: BlockTable, start: int, end: int) -> None:
        """Makes tokens ``start`` to ``end`` of a table in the overflow writable. Raises OverflowFailed."""
        if self.overflow is None or not table.in_overflow:
            return
        first, last = start // PAGE_TOKENS, -(-end // PAGE_TOKENS)
        for page, pages in table.ranges:
            a, b = max(first, 0), min(last, pages)
            if a < b and page != UNMAPPED:
                self.overflow.reserve(page + a, b - a)
            first, last = first - pages, last - pages

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

    def writable(self, table: BlockTable, start: int) -> bool:
        """True if no other table refers to the blocks of the tokens from ``start`` on."""
        pages = table.slots(start, table.tokens)[::PAGE_TOKENS] // PAGE_TOKENS
        return bool((self._references[pages] == 1).all())

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
        """Extends a table like ``grow``, but only if this adds no range and the table has at most two."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        return table.key_ranges is not None and (missing <= 0 or self._extend(table, missing))

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
        """Frees the blocks of the first ``tokens`` tokens, which no layer will read again.

        ``tokens`` is a multiple of WINDOW_STEP.
        """
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

    def free(self, table: BlockTable) -> None:
        """Drops a table's references and empties it; unreferenced blocks become free. Idempotent."""
        for page, pages in table.mapped_ranges:
            part = self._references[page : page + pages]
            part -= 1
            for first, length in zero_runs(part):
                self._let_go(page + first, length)
        table.ranges.clear()

    def count_distinct_pages(self, tables: list[BlockTable]) -> int:
        """Number of pool blocks (without overflow) in these tables; a shared block counts once."""
        held = np.zeros(self.pages, bool)
        for table in tables:
            for page, pages in [] if table.in_overflow else table.mapped_ranges:
                held[page : page + pages] = True
        return int(held.sum())

    def count_exclusive_pages(self, table: BlockTable, also: BlockTable | None = None) -> int:
        """Number of pool blocks that become free if this table, and ``also`` if given, are freed."""
        if table.in_overflow:
            return 0
        references = self._references if also is None else self._references - self._references_of([also])
        return sum(int((references[page : page + pages] == 1).sum()) for page, pages in table.mapped_ranges)

    def longest_range_without(self, tables: list[BlockTable]) -> int:
        """Length of the longest range of pool blocks that are free, or become free if these tables are freed."""
        left = self._references - self._references_of(tables)
        return max((length for _, length in zero_runs(left[: self.pages])), default=0)

    def references_match(self, tables: list[BlockTable]) -> bool:
        """True if the reference counts are those of exactly these tables."""
        return bool(np.array_equal(self._references_of(tables), self._references))

    def _references_of(self, tables: list[BlockTable]) -> NDArray[np.int32]:
        """Number of these tables that have each block, in pool and overflow."""
        counted = np.zeros_like(self._references)
        for table in tables:
            for page, pages in table.mapped_ranges:
                counted[page : page + pages] += 1
        return counted

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is either free or referenced."""
        assert self._references.min() >= 0, "a page was freed more often than it was taken"
        for extents, first in ((self._extents, 0), (self._apart, self._first_apart)):
            if extents is not None:
                extents.check_integrity()
                held, free = np.count_nonzero(self._references[first : first + extents.capacity]), extents.free_units
                assert held + free == extents.capacity, f"{held} pages are held, {free} free of {extents.capacity}"

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


def zero_runs(counts: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Returns ``(first, length)`` of each run of zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate(([1], counts, [1])) == 0))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
