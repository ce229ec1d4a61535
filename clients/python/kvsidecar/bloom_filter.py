"""What a daemon's index might hold, in a Bloom filter that clients map: most prompts that are not stored need no call.

``kvsidecar.cache.v1.IndexSummary`` is the specification. After Fan, Cao, Almeida and Broder, "Summary Cache" (2000).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from kvsidecar import keys

# Prompts that share fewer leading tokens than this with all that is stored count as not stored.
HEAD_TOKENS = 8
_POSITIONS = struct.Struct("<4I")


def positions(key: bytes, size_bytes: int) -> Iterable[int]:
    """Numbers of a key's bits in a filter of so many bytes."""
    bits = size_bytes * 8
    return (n % bits for n in _POSITIONS.unpack_from(key))


class BloomFilter:
    """A filter's bytes, for reading. False positives are possible, false negatives are not."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __contains__(self, key: bytes) -> bool:
        memory = self._memory
        return all(memory[n >> 3] >> (n & 7) & 1 for n in positions(key, len(memory)))

    def may_contain_prefix(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Whether a prompt might begin with a stored chunk, or with the first HEAD_TOKENS of one. Shorter ones always
        might."""
        if len(tokens) < HEAD_TOKENS:
            return True
        head = keys.token_bytes(tokens[:HEAD_TOKENS])
        ends = range(len(head), 0, -keys.TOKEN_BYTES)
        return any(keys.head_hash(root, head[:end]) in self for end in ends)

    def may_contain_content(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Whether a chunk of exactly these tokens might be stored, in whatever context."""
        return keys.content_hash(root, tokens) in self
