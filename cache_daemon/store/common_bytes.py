"""Common prefix of two arrays of fixed-width elements."""

from __future__ import annotations

from kvsidecar.keys import TOKEN_BYTES


def common_bytes(a: bytes, b: bytes, width: int = TOKEN_BYTES) -> int:
    """Return the length in bytes of the common prefix of whole elements."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n - n % width
    differ = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    shared = ((differ & -differ).bit_length() - 1) // 8
    return shared - shared % width
