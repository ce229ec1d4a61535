"""Token tags: 16 bits for each token of a prompt, by a random key of this process."""

from __future__ import annotations

import secrets

import numpy as np
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS

TAG_BYTES = 2
_TOKENS, _TAGS = np.dtype("<u4"), np.dtype("<u2")
# Tokens tagged at once: a whole chunk. Position keys repeat after this number of positions.
MAX_TAGGED_TOKENS = MAX_CHUNK_TOKENS
_KEY_BITS = 32


class TokenTags:
    """Keyed hash of tokens at their positions.

    Equal tokens at equal positions have equal tags. Two different tokens have equal tags with probability 1/65,536.
    Without the key, which no other process has, tags reveal neither tokens nor repetitions.
    """

    def __init__(self) -> None:
        multiplier, self._finish = (np.uint32(secrets.randbits(_KEY_BITS) | 1) for _ in range(2))
        self._multiplier = multiplier
        once = np.frombuffer(secrets.token_bytes(4 * MAX_TAGGED_TOKENS), np.uint32)
        self._positions = np.concatenate([once, once])

    def tag(self, ids: bytes, start: int = 0) -> bytes:
        """Return the tags of at most ``MAX_TAGGED_TOKENS`` tokens (uint32 little-endian), the first at ``start``."""
        first = start % MAX_TAGGED_TOKENS
        mixed = np.frombuffer(ids, _TOKENS) * self._multiplier
        mixed ^= self._positions[first : first + len(mixed)]
        mixed ^= mixed >> np.uint32(15)
        mixed *= self._finish
        return mixed.view(_TAGS)[1::2].tobytes()  # the upper half of each 32-bit value
