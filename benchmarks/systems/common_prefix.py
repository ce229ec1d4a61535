"""Common prefix of two prompts. Imports only the standard library, because engines' environments have no more."""

from __future__ import annotations


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # binary search for the end of the common prefix
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
