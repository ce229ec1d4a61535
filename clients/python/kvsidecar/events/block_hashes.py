"""The names of blocks: those that vLLM gives them with ``--prefix-caching-hash-algo sha256_cbor``.

A block's hash is SHA-256 over the canonical CBOR (RFC 8949, section 4.2.1) of ``[hash of the block before, its tokens,
extra keys]``; the first block's predecessor is the hash of a seed. With the same algorithm, seed and block length an
engine's own events and the daemon's give one block one name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# What vLLM takes where PYTHONHASHSEED is not set (vllm/v1/core/kv_cache_utils.py).
DEFAULT_SEED = "vllm-none-hash"

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL = b"\xf6"


def seed_hash(seed: str = DEFAULT_SEED) -> bytes:
    """The predecessor of a prompt's first block."""
    return hashlib.sha256(_text(seed)).digest()


def block_hash(before: bytes, tokens: Sequence[int], salt: str | bytes = b"") -> bytes:
    """A block's hash, 32 bytes. ``salt`` is that of the prompt, for its first block, and empty for all others."""
    extra = _NULL
    if salt:
        named = _text(salt) if isinstance(salt, str) else _head(_BYTES, len(salt)) + salt
        extra = _head(_ARRAY, 1) + _head(_ARRAY, 2) + _text("cache_salt") + named
    ids = b"".join([_head(_UNSIGNED, token) for token in tokens])
    parts = _head(_ARRAY, 3) + _head(_BYTES, len(before)) + before + _head(_ARRAY, len(tokens)) + ids + extra
    return hashlib.sha256(parts).digest()


def external(block: bytes) -> int:
    """A block's name in events: the last 64 bits of its hash."""
    return int.from_bytes(block[-8:], "big")


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(_TEXT, len(data)) + data


def _head(major: int, value: int) -> bytes:
    """A CBOR item's beginning: its type, and its value or length in as few bytes as it takes."""
    if value < 24:
        return bytes((major | value,))
    if value < 1 << 8:
        return bytes((major | 24, value))
    if value < 1 << 16:
        return bytes((major | 25,)) + value.to_bytes(2, "big")
    return bytes((major | 26,)) + value.to_bytes(4, "big")
