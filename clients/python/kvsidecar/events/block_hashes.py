"""Block hashes as in vLLM with ``--prefix-caching-hash-algo sha256_cbor``.

A block's hash is SHA-256 over the canonical CBOR (RFC 8949, section 4.2.1) of ``[parent block's hash, tokens, extra
keys]``; the first block's parent is the hash of a seed. With the same algorithm, seed and block length, events of an
engine and of the daemon use the same hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# vLLM's seed when PYTHONHASHSEED is not set (vllm/v1/core/kv_cache_utils.py).
DEFAULT_SEED = "vllm-none-hash"

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL = b"\xf6"


def seed_hash(seed: str = DEFAULT_SEED) -> bytes:
    """Return the parent hash of a prompt's first block."""
    return hashlib.sha256(_text(seed)).digest()


def block_hash(before: bytes, tokens: Sequence[int], salt: str | bytes = b"") -> bytes:
    """Return a block's hash, 32 bytes.

    ``salt`` is the prompt's salt for the first block, and empty for all other blocks.
    """
    extra = _NULL
    if salt:
        named = _text(salt) if isinstance(salt, str) else _head(_BYTES, len(salt)) + salt
        extra = _head(_ARRAY, 1) + _head(_ARRAY, 2) + _text("cache_salt") + named
    ids = b"".join([_head(_UNSIGNED, token) for token in tokens])
    parts = _head(_ARRAY, 3) + _head(_BYTES, len(before)) + before + _head(_ARRAY, len(tokens)) + ids + extra
    return hashlib.sha256(parts).digest()


def external_hash(block: bytes) -> int:
    """Return a block's hash as events contain it: the last 64 bits."""
    return int.from_bytes(block[-8:], "big")


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(_TEXT, len(data)) + data


def _head(major: int, value: int) -> bytes:
    """Encode a CBOR item's head: its type, and its value or length.

    Uses the fewest bytes.
    """
    if value < 24:
        return bytes((major | value,))
    if value < 1 << 8:
        return bytes((major | 24, value))
    if value < 1 << 16:
        return bytes((major | 25,)) + value.to_bytes(2, "big")
    return bytes((major | 26,)) + value.to_bytes(4, "big")
