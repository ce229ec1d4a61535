"""Common prefixes of arrays of fixed-width elements."""

from __future__ import annotations

from typing import TypeVar

from kvsidecar.keys import TOKEN_BYTES
from sortedcontainers import SortedDict

T = TypeVar("T")
_FIRST_BLOCK = 64  # bytes; each further block is twice as long


def common_bytes(a: bytes, b: bytes, width: int = TOKEN_BYTES) -> int:
    """Return the length in bytes of the common prefix of whole elements."""
    n, at, size = min(len(a), len(b)), 0, _FIRST_BLOCK
    while at < n:  # most arrays differ early: compare short blocks first
        end = min(at + size, n)
        if a[at:end] != b[at:end]:
            differ = int.from_bytes(a[at:end], "little") ^ int.from_bytes(b[at:end], "little")
            at += ((differ & -differ).bit_length() - 1) // 8
            break
        at, size = end, size * 2
    return at - at % width


def nearest(sorted_arrays: SortedDict[bytes, T], array: bytes, width: int = TOKEN_BYTES) -> tuple[T, int]:
    """Return the value of the key that shares most with ``array``, and the length in bytes of their common prefix.

    That key is next to the sort position of ``array``. There must be a key.
    """
    at = sorted_arrays.bisect_left(array)
    around = [sorted_arrays.peekitem(i) for i in (at - 1, at) if 0 <= i < len(sorted_arrays)]
    return max(((value, common_bytes(key, array, width)) for key, value in around), key=lambda found: found[1])
