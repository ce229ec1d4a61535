"""The paged KV pool.

Pages of ``PAGE_TOKENS`` tokens. A sequence's pages are taken as one contiguous range where one is free, so that
attention can read them in place; otherwise as several ranges, which attention gathers. The page after the last
is for padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from kvsidecar.extents import Extents
from numpy.typing import NDArray

PAGE_TOKENS = 32
# Attention reads whole blocks of this many keys; see attention.py.
KEY_BLOCK = 512


@dataclass(eq=False)
class BlockTable:
    """The pages of one sequence as ``(first page, pages)`` ranges in the order of its tokens."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return sum(pages for _, pages in self.ranges) * PAGE_TOKENS

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Pool slots of the tokens ``start`` to ``end``, ``[end - start]``."""
        if len(self.ranges) == 1:
            first = self.ranges[0][0] * PAGE_TOKENS
            return np.arange(first + start, first + end)
        parts, at = [], 0
        for page, pages in self.ranges:
            size = pages * PAGE_TOKENS
            a, b = max(start - at, 0), min(end - at, size)
            if a < b:
                parts.append(np.arange(page * PAGE_TOKENS + a, page * PAGE_TOKENS + b))
            at += size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def first_slot(self) -> int | None:
        """Where the tokens lie when they lie in one piece."""
        return self.ranges[0][0] * PAGE_TOKENS if len(self.ranges) == 1 else None


class KVPool:
    """Keys and values ``[layers, kv_heads, slots, head_dim]`` of all sequences of an engine: a head's keys lie
    together, which is how attention reads them.

    Not thread-safe, but for the tensors' contents: a slot belongs to whoever holds its block table.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = max(1, tokens // PAGE_TOKENS)
        self._extents = Extents(self.pages)
        self.padding_slot = self.pages * PAGE_TOKENS
        shape = (layers, kv_heads, self.padding_slot + KEY_BLOCK, head_dim)
        # Written once so that the memory is there before the first request needs it.
        self.keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.values = torch.empty(shape, dtype=dtype, device=device).zero_()

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def free_pages(self) -> int:
        return self._extents.free_units

    def allocate(self, tokens: int, spare: int = 0) -> BlockTable | None:
        """Pages for ``tokens`` tokens, and for ``spare`` more if they are free; None when too few are."""
        table = BlockTable()
        pages, wanted = -(-tokens // PAGE_TOKENS), -(-(tokens + spare) // PAGE_TOKENS)
        if pages > self.free_pages:
            return None
        start = self._extents.allocate(wanted)
        if start is not None:
            table.ranges.append((start, wanted))
            return table
        self._fill(table, pages)
        return table

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Makes room for ``tokens`` tokens in all. False, with nothing changed, when too few pages are free."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        if missing <= 0:
            return True
        if missing > self.free_pages:
            return False
        page, pages = table.ranges[-1]
        if self._extents.extend(page, missing):
            table.ranges[-1] = (page, pages + missing)
        else:
            self._fill(table, missing)
        return True

    def free(self, table: BlockTable) -> None:
        """Gives all pages of a table back and empties it. Idempotent."""
        for start, _ in table.ranges:
            self._extents.free(start)
        table.ranges.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all pages are accounted for."""
        self._extents.check_integrity()

    def _fill(self, table: BlockTable, pages: int) -> None:
        while pages:
            take = min(pages, self._extents.largest_free)
            start = self._extents.allocate(take)
            assert start is not None, "fewer pages free than counted"
            table.ranges.append((start, take))
            pages -= take
