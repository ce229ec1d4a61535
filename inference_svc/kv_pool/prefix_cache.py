"""Prefix cache: finished sequences whose blocks stay in the pool until eviction.

The next turn of a conversation continues in these blocks, without a copy and without a lookup at the daemon. Only the
engine's thread uses this module.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from kvsidecar.errors import OverflowFailed
from numpy.typing import NDArray

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool

TokenArray = NDArray[np.uint32]
# Minimum length of a shared prefix; the engine computes shorter prefixes again.
MIN_SHARED_TOKENS = PAGE_TOKENS


@dataclass(frozen=True)
class CacheScope:
    """Boundary of reuse: sequences of one tenant and adapter share keys and values.

    An empty field means no tenant or no adapter.
    """

    tenant_salt: bytes = b""
    adapter: bytes = b""


@dataclass(frozen=True)
class StoredPrefix:
    """Prefix that the daemon stores: ``tokens`` tokens, ending with chunk ``prefix_hash``.

    An empty hash means that nothing is stored.
    """

    tokens: int = 0
    prefix_hash: bytes = b""
    covered: int = 0  # number of stored tokens, including a partly used chunk behind ``tokens``


@dataclass(frozen=True, eq=False)
class CachedSequence:
    """A finished sequence: its tokens ``[n]``, and the table of their blocks, which it owns."""

    tokens: TokenArray
    table: BlockTable
    scope: CacheScope
    stored: StoredPrefix

    @cached_property
    def head(self) -> bytes:
        """The first MIN_SHARED_TOKENS tokens as bytes: a prompt that differs in them shares no reusable prefix."""
        return self.tokens[:MIN_SHARED_TOKENS].tobytes()


def as_array(tokens: list[int]) -> TokenArray:
    """Converts token ids to an array for comparisons."""
    return np.asarray(tokens, np.uint32)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Number of equal leading tokens."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class WaitingPrompt:
    """Tokens of a waiting sequence, compared once with those of each cached or live sequence.

    Admission asks again in every step, and the comparison of long prompts takes microseconds.
    """

    def __init__(self, tokens: TokenArray) -> None:
        self.tokens, self._shared = tokens, WeakKeyDictionary[object, int]()

    def shared_with(self, other: object, tokens: TokenArray) -> int:
        """Number of leading tokens that are also those of ``other``, whose ``tokens`` never change."""
        found = self._shared.get(other)
        if found is None:
            found = common_prefix(self.tokens[:MIN_SHARED_TOKENS], tokens)
            if found == MIN_SHARED_TOKENS:
                found = common_prefix(self.tokens, tokens)
            self._shared[other] = found
        return found


class PrefixCache:
    """LRU cache of finished sequences. Owns their blocks."""

    def __init__(self, pool: KVPool, max_sequences: int) -> None:
        self._pool, self._max = pool, max_sequences
        self._entries: OrderedDict[int, CachedSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """False if the cache keeps no sequence."""
        return self._max > 0

    @property
    def entries(self) -> list[CachedSequence]:
        """All entries, least recently used first."""
        return list(self._entries.values())

    @property
    def tables(self) -> list[BlockTable]:
        """Block tables of all entries."""
        return [entry.table for entry in self._entries.values()]

    def longest_prefix(self, scope: CacheScope, prompt: WaitingPrompt) -> tuple[CachedSequence | None, int]:
        """Finds the entry with the longest common prefix, and the prefix's length; None below MIN_SHARED_TOKENS.

        The prefix never includes the prompt's last token.
        """
        found, longest, head = None, 0, prompt.tokens[:MIN_SHARED_TOKENS].tobytes()
        for entry in self._entries.values():
            if entry.scope == scope and entry.head == head:
                n = min(prompt.shared_with(entry, entry.tokens), len(prompt.tokens) - 1)
                if n > longest and self._pool.covers_window(entry.table, n):
                    found, longest = entry, n
        return found, longest

    def insert(self, entry: CachedSequence) -> None:
        """Adds a finished sequence and owns its blocks. Frees entries that are prefixes of this sequence."""
        if not self.enabled:
            self._pool.free(entry.table)
            return
        for key, old in list(self._entries.items()):
            same = old.scope == entry.scope and self._pool.covers_window(entry.table, len(old.tokens))
            if same and common_prefix(old.tokens, entry.tokens) == len(old.tokens):
                self._drop(key)
        self._entries[id(entry)] = entry
        while len(self._entries) > self._max:
            self._drop(next(iter(self._entries)))

    def drop_corrupt(self, scope: CacheScope, tokens: TokenArray) -> None:
        """Drops entries that begin with ``tokens``. Zeroes their blocks, except blocks that other tables share."""
        for key, entry in list(self._entries.items()):
            if entry.scope == scope and common_prefix(entry.tokens, tokens) == len(tokens):
                self._pool.zero_exclusive(entry.table)
                self._drop(key)

    def touch(self, entry: CachedSequence) -> None:
        """Marks an entry as most recently used."""
        self._entries.move_to_end(id(entry))

    def take(self, entry: CachedSequence) -> BlockTable:
        """Removes an entry; the caller owns its blocks."""
        return self._entries.pop(id(entry)).table

    def evict(self, in_overflow: bool = False, keep: CachedSequence | None = None) -> bool:
        """Frees the least recently used entry, of the overflow if ``in_overflow``, but not ``keep``.

        False if there is no such entry.
        """
        for key, entry in self._entries.items():
            if entry.table.in_overflow == in_overflow and entry is not keep:
                self._drop(key)
                return True
        return False

    def allocate(self, tokens: int, spare: int = 0) -> BlockTable | None:
        """Allocates blocks like ``KVPool.allocate``, and evicts entries until there are enough; None if too few are."""
        found = self._pool.allocate(tokens, spare)
        while found is None and self.evict():
            found = self._pool.allocate(tokens, spare)
        return found

    def allocate_contiguous(self, tokens: int, keep: CachedSequence | None = None) -> BlockTable | None:
        """Allocates contiguous blocks, and evicts entries but ``keep`` until there is such a range.

        None, without evictions, if those could not make a range free.
        """
        found = self._pool.allocate_contiguous(tokens)
        if found is None:
            others = [entry.table for entry in self._entries.values() if entry is not keep]
            if self._pool.longest_range_without(others) * PAGE_TOKENS < tokens:
                return None
        while found is None and self.evict(keep=keep):
            found = self._pool.allocate_contiguous(tokens)
        return found

    @property
    def available_overflow_tokens(self) -> int:
        """Token slots of the overflow that are free or belong to entries; slots that entries share count repeatedly."""
        kept = sum(table.tokens for table in self.tables if table.in_overflow)
        return self._pool.free_overflow_pages * PAGE_TOKENS + kept

    def allocate_overflow(self, tokens: int) -> BlockTable | None:
        """Allocates overflow blocks for ``tokens`` tokens, and evicts entries there until there are enough.

        None, without evictions, if that could not make enough blocks free.
        """
        if tokens > self.available_overflow_tokens:
            return None
        found = self._pool.allocate_overflow(tokens)
        while found is None and self.evict(in_overflow=True):
            found = self._pool.allocate_overflow(tokens)
        return found

    def reserve_overflow(self, table: BlockTable, start: int, end: int) -> None:
        """Makes tokens writable with ``KVPool.reserve_overflow``.

        While there is no space, evicts entries in the overflow if this makes space. Raises OverflowFailed.
        """
        while True:
            try:
                return self._pool.reserve_overflow(table, start, end)
            except OverflowFailed:
                overflow = self._pool.overflow
                if overflow is None or not overflow.frees_space or not self.evict(in_overflow=True):
                    raise

    def _drop(self, key: int) -> None:
        self._pool.free(self._entries.pop(key).table)
