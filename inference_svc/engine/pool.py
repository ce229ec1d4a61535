"""The paged KV pool.

Pages of ``PAGE_TOKENS`` tokens. A sequence's pages are taken as one contiguous range where one is free, so that
torch's attention can read them in place; otherwise as several ranges, which it gathers and our kernels read as they
are. The page after the last is for padding rows.

Pages are counted by the tables that refer to them. Only whole pages are shared, and of a sequence only tokens that
are computed: whoever writes, writes behind them, so that the copy of copy-on-write is made when sharing begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from kvkernels.cpu import attention as cpu_attention
from kvsidecar.extents import Extents
from numpy.typing import NDArray

PAGE_TOKENS = 32
# torch's attention reads keys in blocks of this many; see attention.py.
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


class DeviceAttention(Protocol):
    """Our attention on a pool's device; see ``native_attention``. A batch is one of ``rows``, which build on this."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of batches that it is the faster way for."""
        ...

    def serves(self, batch: Any) -> bool: ...

    def __call__(
        self, query: torch.Tensor, batch: Any, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor: ...


class KVPool:
    """Keys and values ``[layers, kv_heads, slots, head_dim]`` of all sequences of an engine: a head's keys lie
    together, which is how attention reads them.

    Not thread-safe, but for the tensors' contents: a slot belongs to whoever holds its block table.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Ours for the pool's device, for batches in which they are to attend.
        self.native: DeviceAttention | None = None
        self.pages = max(1, tokens // PAGE_TOKENS)
        self._extents = Extents(self.pages)
        self._references: NDArray[np.int32] = np.zeros(self.pages, np.int32)
        self.padding_slot = self.pages * PAGE_TOKENS
        shape = (layers, kv_heads, self.padding_slot + KEY_BLOCK, head_dim)
        # Written once so that the memory is there before the first request needs it.
        self.keys = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.values = torch.empty(shape, dtype=dtype, device=device).zero_()

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, ``[kv_heads, slots, head_dim]``."""
        return list(zip(self.keys, self.values, strict=True))

    @cached_property
    def read_by_pages(self) -> bool:
        """Whether our CPU kernel attends over this pool: pages anywhere are as good as pages in one piece."""
        return self.keys.device.type == "cpu" and cpu_attention.serves(self.keys.dtype, self.keys.shape[3])

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
        if self._take(table, wanted):
            return table
        self._fill(table, pages)
        return table

    def allocate_contiguous(self, tokens: int) -> BlockTable | None:
        """Pages for ``tokens`` tokens in one piece, or None."""
        table = BlockTable()
        return table if self._take(table, -(-tokens // PAGE_TOKENS)) else None

    def share(self, table: BlockTable, tokens: int) -> BlockTable:
        """A table of the whole pages among the first ``tokens`` tokens of another, which both now hold."""
        shared, left = BlockTable(), tokens // PAGE_TOKENS
        for page, pages in table.ranges:
            take = min(pages, left)
            if take:
                shared.ranges.append((page, take))
                self._references[page : page + take] += 1
            left -= take
        return shared

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Makes room for ``tokens`` tokens in all. False, with nothing changed, when too few pages are free."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        if missing <= 0:
            return True
        if missing > self.free_pages:
            return False
        if not table.ranges or not self._extend(table, missing):
            self._fill(table, missing)
        return True

    def grow_in_place(self, table: BlockTable, tokens: int) -> bool:
        """Like ``grow``, but only if the table stays, or is, in one piece."""
        missing = -(-(tokens - table.tokens) // PAGE_TOKENS)
        return len(table.ranges) == 1 and (missing <= 0 or self._extend(table, missing))

    def trim(self, table: BlockTable, tokens: int) -> None:
        """Frees the pages that the first ``tokens`` tokens do not need."""
        keep, kept = -(-tokens // PAGE_TOKENS), []
        for page, pages in table.ranges:
            stay = min(pages, keep)
            if stay:
                kept.append((page, stay))
            if stay < pages:
                self.free(BlockTable([(page + stay, pages - stay)]))
            keep -= stay
        table.ranges[:] = kept

    def writable(self, table: BlockTable, start: int) -> bool:
        """Whether no other table holds the pages of the tokens from ``start`` on."""
        pages = table.slots(start, table.tokens)[::PAGE_TOKENS] // PAGE_TOKENS
        return bool((self._references[pages] == 1).all())

    def copy(self, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Copies keys and values of the tokens ``start`` to ``end`` from one sequence's pages to another's."""
        if end <= start:
            return
        a, b = source.first_slot, target.first_slot
        for tensor in (self.keys, self.values):
            if a is not None and b is not None:
                tensor[:, :, b + start : b + end] = tensor[:, :, a + start : a + end]
            else:
                here = torch.from_numpy(source.slots(start, end)).to(tensor.device)
                there = torch.from_numpy(target.slots(start, end)).to(tensor.device)
                tensor.index_copy_(2, there, tensor.index_select(2, here))

    def free(self, table: BlockTable) -> None:
        """Lets go of all pages of a table and empties it; those nobody else holds are free. Idempotent."""
        for page, pages in table.ranges:
            part = self._references[page : page + pages]
            part -= 1
            for first, length in _zero_runs(part):
                self._extents.free_part(page + first, length)
        table.ranges.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all pages are accounted for."""
        self._extents.check_integrity()
        held = int(np.count_nonzero(self._references))
        assert self._references.min() >= 0, "a page was freed more often than it was taken"
        assert held + self.free_pages == self.pages, f"{held} pages are held, {self.free_pages} free of {self.pages}"

    def distinct_pages(self, tables: list[BlockTable]) -> int:
        """How many pages these tables hold, shared ones counted once."""
        held = np.zeros(self.pages, bool)
        for table in tables:
            for page, pages in table.ranges:
                held[page : page + pages] = True
        return int(held.sum())

    def own_pages(self, table: BlockTable) -> int:
        """How many pages are free when this table goes."""
        return sum(int((self._references[page : page + pages] == 1).sum()) for page, pages in table.ranges)

    def erase(self, table: BlockTable) -> None:
        """Clears the pages that only this table holds. Attention reads past a sequence's end and multiplies what it
        finds by zero, which of NaN makes NaN: whoever gets these pages must find something finite."""
        for page, pages in table.ranges:
            for first, length in _zero_runs(self._references[page : page + pages] - 1):
                start = (page + first) * PAGE_TOKENS
                for tensor in (self.keys, self.values):
                    tensor[:, :, start : start + length * PAGE_TOKENS] = 0

    def held_by(self, tables: list[BlockTable]) -> bool:
        """Whether these tables hold exactly the references that are counted."""
        counted = np.zeros_like(self._references)
        for table in tables:
            for page, pages in table.ranges:
                counted[page : page + pages] += 1
        return bool(np.array_equal(counted, self._references))

    def _take(self, table: BlockTable, pages: int) -> bool:
        """Adds one range of so many pages to a table, if there is one."""
        start = self._extents.allocate(pages)
        if start is None:
            return False
        self._references[start : start + pages] = 1
        table.ranges.append((start, pages))
        return True

    def _extend(self, table: BlockTable, pages: int) -> bool:
        """Lengthens a table's last range by pages that lie behind it, if they are free."""
        page, held = table.ranges[-1]
        end = page + held
        if not self._extents.extend(end, pages):
            return False
        self._references[end : end + pages] = 1
        table.ranges[-1] = (page, held + pages)
        return True

    def _fill(self, table: BlockTable, pages: int) -> None:
        while pages:
            take = min(pages, self._extents.largest_free)
            taken = self._take(table, take)
            assert taken, "fewer pages free than counted"
            pages -= take


def _zero_runs(counts: NDArray[np.int32]) -> list[tuple[int, int]]:
    """``(first, length)`` of the runs of zeros."""
    edges = np.flatnonzero(np.diff(np.concatenate(([1], counts, [1])) == 0))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
