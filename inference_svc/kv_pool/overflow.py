"""Overflow: blocks behind a pool's own blocks, in memory that is slower and larger."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

from torch import Tensor

from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS


class Overflow(Protocol):
    """Tensors of a pool and of the blocks behind it.

    ``keys`` and ``values`` have the pool's shape ``[layers, kv_heads, slots, head_dim]``. The first ``memory_pages``
    blocks are the pool's own, followed by padding. The overflow has ``pages`` blocks, from block ``first_page`` on.
    """

    keys: Tensor
    values: Tensor
    memory_pages: int
    first_page: int
    pages: int
    frees_space: ClassVar[bool]
    """True if ``release`` makes space for other blocks."""
    keeps_preempted: ClassVar[bool]
    """True if a preempted sequence moves here: faster than to the daemon and back."""

    @property
    def size_bytes(self) -> int:
        """Size of the overflow with all its blocks in use."""
        ...

    def reserve(self, page: int, pages: int) -> None:
        """Makes blocks writable, before they are written. Raises OverflowFailed if there is no space."""
        ...

    def release(self, page: int, pages: int) -> None:
        """Takes back unreferenced blocks."""
        ...

    def clear(self, page: int, pages: int) -> None:
        """Makes sure that blocks, which may contain NaN, do not contain NaN after their release."""
        ...


def count_blocks(
    memory_tokens: int, tokens: int, page_bytes: int, granule: int, group: int = 1
) -> tuple[int, int, int]:
    """Returns ``memory_pages``, ``first_page`` and ``pages`` of an overflow of ``tokens`` tokens.

    In each strip of ``page_bytes`` per block, both parts are whole granules of ``granule`` bytes, and whole groups of
    ``group`` blocks.
    """
    each = math.lcm(granule // math.gcd(granule, page_bytes), group)

    def whole(pages: int) -> int:
        return -(-pages // each) * each

    memory_pages = max(1, memory_tokens // PAGE_TOKENS)
    return memory_pages, whole(memory_pages + KEY_BLOCK // PAGE_TOKENS), whole(-(-tokens // PAGE_TOKENS))
