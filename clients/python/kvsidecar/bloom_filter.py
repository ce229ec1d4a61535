"""Bloom filter over a daemon's index, which clients map into their memory.

With it, clients need no call for most prompts that are not stored. ``kvsidecar.cache.v1.IndexSummary`` is the
specification. After Fan, Cao, Almeida and Broder, "Summary Cache" (2000).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvsidecar import keys

# A prompt that shares fewer leading tokens than this with every stored chunk counts as not stored.
HEAD_TOKENS = 8
_POSITIONS = struct.Struct("<4I")


def positions(key: bytes, size_bytes: int) -> Iterable[int]:
    """Return the bit positions of a key in a filter of ``size_bytes``."""
    bits = size_bytes * 8
    return (n % bits for n in _POSITIONS.unpack_from(key))


class BloomFilter:
    """Read-only view of a filter's bytes. Has false positives, but no false negatives."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __contains__(self, key: bytes) -> bool:
        memory = self._memory
        return all(memory[n >> 3] >> (n & 7) & 1 for n in positions(key, len(memory)))

    def may_contain_prefix(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Return whether a prompt might begin with a stored chunk or its first HEAD_TOKENS.

        True for every prompt shorter than HEAD_TOKENS.
        """
        if len(tokens) < HEAD_TOKENS:
            return True
        head = keys.token_bytes(tokens[:HEAD_TOKENS])
        ends = range(len(head), 0, -keys.TOKEN_BYTES)
        return any(keys.head_hash(root, head[:end]) in self for end in ends)

    def may_contain_content(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Return whether a chunk of exactly these tokens might be stored, in any context."""
        return keys.content_hash(root, tokens) in self
