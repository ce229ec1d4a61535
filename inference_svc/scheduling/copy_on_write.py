"""Copy-on-write: starts a sequence on the blocks of another sequence.

A sequence writes only behind its computed tokens, and shares only whole blocks. So only the partial block that the new
sequence continues to write is copied, once, when sharing begins. Only the engine's thread uses this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence, PrefixCache
from inference_svc.sequence.sequence import Sequence

# A device copies shorter prefixes: attention over a second range takes two more launches for each layer.
_MIN_RANGE_TOKENS = 1024
# Sequences share a multiple of this many tokens in one range. Prompts that happen to agree in a few tokens behind a
# common prefix then share the same blocks, which attention reads once.
_RANGE_STEP = 8 * PAGE_TOKENS


@dataclass(frozen=True)
class PrefixSource:
    """Prefix in the pool: the first ``tokens`` tokens of a cached or a running sequence."""

    tokens: int = 0
    cached: CachedSequence | None = None
    running: Sequence | None = None

    @property
    def table(self) -> BlockTable:
        """Block table of the source. The source must have one."""
        table = self.cached.table if self.cached else self.running.kv.table if self.running else None
        assert table is not None, "a source without pages"
        return table

    @property
    def num_released(self) -> int:
        """Number of leading tokens whose blocks were released."""
        return self.table.num_released if self.tokens else 0

    @property
    def num_in_place(self) -> int:
        """Number of leading tokens that need no new blocks."""
        return self.tokens if self.running is not None else self.num_released


class CopyOnWrite:
    """Attaches the blocks of a prefix source to new sequences of one pool."""

    def __init__(self, pool: KVPool, prefix_cache: PrefixCache) -> None:
        self._pool, self._prefix_cache = pool, prefix_cache

    def adopt(self, sequence: Sequence, source: PrefixSource, wanted: int) -> bool:
        """Continues in the blocks of a cached sequence. False if that is not possible.

        The prompt must extend the cached sequence, and the blocks after it must be free. The request must allow
        caching, because the cached sequence would otherwise be lost at the request's end.
        """
        cached, pool = source.cached, self._pool
        if cached is None or not sequence.request.cache.write or source.tokens + PAGE_TOKENS < len(cached.tokens):
            return False
        if cached.table.first_slot is None and not (pool.attends_by_pages or pool.merges_ranges):
            return False
        mine = pool.writable(cached.table, source.tokens)
        if not mine or not pool.grow_in_place(cached.table, wanted):
            return False
        sequence.kv.attach(self._prefix_cache.take(cached))
        self.begin(sequence, source)
        return True

    def share(self, sequence: Sequence, source: PrefixSource, needed: int) -> bool:
        """Shares the prefix's whole blocks, and copies the partial block at its end."""
        if source.cached is not None:
            self._prefix_cache.touch(source.cached)
        table = self._pool.share(source.table, source.tokens)
        shared = table.tokens
        while not self._pool.grow(table, needed):
            # This may evict the source itself: the new table has references to the source's blocks.
            if not self._prefix_cache.evict():
                self._pool.free(table)
                return False
        source_table = source.table
        kept = bool(source_table.ranges)
        end = source.tokens if kept else shared
        if not self._pool.covers_window(table, end):  # the partial block, with keys inside the window, was evicted
            self._pool.free(table)
            return False
        sequence.kv.attach(table)
        self._pool.copy(source_table, table, shared, end)
        self.begin(sequence, PrefixSource(end, source.cached, source.running))
        return True

    def share_range(self, sequence: Sequence, source: PrefixSource, wanted: int) -> bool:
        """Shares the whole blocks of the prefix that are in one range, and continues in another one."""
        if not self._pool.merges_ranges or not source.tokens:
            return False
        from_table = source.table
        shared = min(source.tokens, from_table.ranges[0][1] * PAGE_TOKENS) // _RANGE_STEP * _RANGE_STEP
        if shared < _MIN_RANGE_TOKENS:
            return False
        own = self._prefix_cache.allocate_contiguous(wanted - shared, source.cached)
        if own is None:
            return False
        table = self._pool.share(from_table, shared)
        table.ranges += own.ranges
        sequence.kv.attach(table)
        self._pool.copy_in_pieces(from_table, table, shared, source.tokens)
        if source.cached is not None:
            self._prefix_cache.touch(source.cached)
        self.begin(sequence, source)
        return True

    def copy(self, sequence: Sequence, source: PrefixSource, wanted: int) -> bool:
        """Copies a prefix into contiguous blocks: torch's attention would have to gather scattered ones."""
        if not source.tokens:
            return False
        left = source.num_released
        table = self._pool.allocate_contiguous(wanted - left)
        if table is None:
            return False
        table = table.shift(0, left) if left else table
        sequence.kv.attach(table)
        table.first_valid_token = source.table.first_valid_token
        self._pool.copy_in_pieces(source.table, table, left, source.tokens)
        if source.cached is not None:
            self._prefix_cache.touch(source.cached)
        self.begin(sequence, source)
        return True

    def copy_across(self, table: BlockTable, sequence: Sequence, source: PrefixSource) -> None:
        """Copies a prefix between the pool and its overflow."""
        table.first_valid_token = source.table.first_valid_token
        self._pool.copy_in_pieces(source.table, table, 0, source.tokens)
        if source.cached is not None:
            self._prefix_cache.touch(source.cached)
        self.begin(sequence, source)

    def begin(self, sequence: Sequence, source: PrefixSource) -> None:
        """Counts the source's tokens as computed in ``sequence``."""
        stored = source.cached.stored if source.cached else source.running.kv.stored if source.running else None
        sequence.kv.reuse_prefix(source.tokens, stored)
