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
        block, other = a[at:end], b[at:end]
        if block != other:
            differ = int.from_bytes(block, "little") ^ int.from_bytes(other, "little")
            at += ((differ & -differ).bit_length() - 1) // 8
            break
        at, size = end, size * 2
    return at - at % width


def nearest(sorted_arrays: SortedDict[bytes, T], array: bytes, width: int = TOKEN_BYTES) -> tuple[T, int]:
    """Return the value of the key that shares most with ``array``, and the length in bytes of their common prefix.

    That key is next to the sort position of ``array``. There must be a key.
    """
    at = sorted_arrays.bisect_left(array)
    key, value = sorted_arrays.peekitem(at - 1 if at else 0)
    common = common_bytes(key, array, width)
    if 0 < at < len(sorted_arrays):
        key, other = sorted_arrays.peekitem(at)
        if (more := common_bytes(key, array, width)) > common:
            return other, more
    return value, common
