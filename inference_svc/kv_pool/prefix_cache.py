"""Finished sequences whose pages stay in the pool until somebody needs the room.

The next turn of a conversation goes on in them without a copy or a question to the daemon. Only the engine's
thread uses this.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from kvsidecar.errors import OverflowFailed
from numpy.typing import NDArray

from inference_svc.engine.sequence import CacheScope, StoredPrefix
from inference_svc.kv_pool.block_table import BLOCK_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool

TokenArray = NDArray[np.uint32]
# Fewer shared tokens than this are computed again.
MIN_SHARED_TOKENS = BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class CachedSequence:
    """Tokens ``[n]`` whose keys and values lie in ``table``'s pages, which it holds."""

    tokens: TokenArray
    table: BlockTable
    realm: CacheScope
    stored: StoredPrefix

    @cached_property
    def head(self) -> bytes:
        """Its first tokens: prompts that differ there share nothing worth having."""
        return self.tokens[:MIN_SHARED_TOKENS].tobytes()


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class PrefixCache:
    """Least recently used goes first. Owns the pages of what it holds."""

    def __init__(self, pool: KVPool, most: int) -> None:
        self._pool, self._most = pool, most
        self._held: OrderedDict[int, CachedSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> list[CachedSequence]:
        """All of them, the least recently used first."""
        return list(self._held.values())

    @property
    def tables(self) -> list[BlockTable]:
        return [r.table for r in self._held.values()]

    def best(self, realm: CacheScope, tokens: TokenArray) -> tuple[CachedSequence | None, int]:
        """The one that shares the longest prefix with ``tokens``, and how long that is; none for less than
        LEAST_SHARED tokens."""
        found, longest, head = None, 0, tokens[:MIN_SHARED_TOKENS].tobytes()
        for resident in self._held.values():
            if resident.realm == realm and resident.head == head:
                n = common_prefix(resident.tokens, tokens)
                if n > longest and self._pool.reaches(resident.table, n):
                    found, longest = resident, n
        return found, longest

    def keep(self, resident: CachedSequence) -> None:
        """Takes a finished sequence's pages over; those that it makes superfluous are freed."""
        if not self._most:
            self._pool.free(resident.table)
            return
        for key, old in list(self._held.items()):
            same = old.realm == resident.realm and self._pool.reaches(resident.table, len(old.tokens))
            if same and common_prefix(old.tokens, resident.tokens) == len(old.tokens):
                self._drop(key)
        self._held[id(resident)] = resident
        while len(self._held) > self._most:
            self._drop(next(iter(self._held)))

    def drop_sharing(self, realm: CacheScope, tokens: TokenArray) -> None:
        """Drops those that begin with ``tokens``, and clears what nobody else has of their pages."""
        for key, resident in list(self._held.items()):
            if resident.realm == realm and common_prefix(resident.tokens, tokens) == len(tokens):
                self._pool.erase(resident.table)
                self._drop(key)

    def touch(self, resident: CachedSequence) -> None:
        """It was of use."""
        self._held.move_to_end(id(resident))

    def take(self, resident: CachedSequence) -> BlockTable:
        """Hands its pages over."""
        return self._held.pop(id(resident)).table

    def evict(self, apart: bool = False) -> bool:
        """Frees the least recently used one in the pool, or in its overflow; False when there is none."""
        key = next((key for key, resident in self._held.items() if resident.table.apart == apart), None)
        if key is None:
            return False
        self._drop(key)
        return True

    def back(self, table: BlockTable, start: int, end: int) -> None:
        """``KVPool.back``; where the disk is full, with the room that residents in the overflow have there. Raises
        OverflowFailed."""
        while True:
            try:
                return self._pool.back(table, start, end)
            except OverflowFailed:
                if not self.evict(apart=True):
                    raise

    def _drop(self, key: int) -> None:
        self._pool.free(self._held.pop(key).table)
