"""Block table: the pool blocks of one sequence.

In identifiers of this package, ``page`` means a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_TOKENS = 32
# Key block of torch's attention on CPUs, in keys; see model_runner/attention.py.
KEY_BLOCK = 512
# Replaces the first block number of a range whose blocks were released.
UNMAPPED = -1


class KeyRanges(NamedTuple):
    """Slots of a sequence's tokens: ``tokens`` tokens from slot ``prefix`` on, and all others from slot ``rest`` on."""

    prefix: int
    tokens: int
    rest: int


@dataclass(eq=False)
class BlockTable:
    """Blocks of one sequence: ``(first block, blocks)`` ranges in token order.

    A range that starts at UNMAPPED was released. Keys and values of tokens before ``first_valid_token`` are missing for
    layers with a sliding window. With ``in_overflow``, all blocks of the table are in the overflow.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    first_valid_token: int = 0
    in_overflow: bool = False

    @property
    def tokens(self) -> int:
        """Token capacity, including released blocks."""
        if len(self.ranges) == 1:
            return self.ranges[0][1] * PAGE_TOKENS
        return sum(pages for _, pages in self.ranges) * PAGE_TOKENS

    @property
    def mapped_ranges(self) -> list[tuple[int, int]]:
        """Ranges that were not released."""
        return [one for one in self.ranges if one[0] != UNMAPPED]

    @property
    def num_released(self) -> int:
        """Number of leading tokens whose blocks were released."""
        return self.ranges[0][1] * PAGE_TOKENS if self.ranges and self.ranges[0][0] == UNMAPPED else 0

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Returns the pool slots ``[end - start]`` of tokens; UNMAPPED for released blocks."""
        if len(self.ranges) == 1 and not self.num_released:
            first = self.ranges[0][0] * PAGE_TOKENS
            return np.arange(first + start, first + end)
        parts, at = [], 0
        for page, pages in self.ranges:
            size = pages * PAGE_TOKENS
            a, b = max(start - at, 0), min(end - at, size)
            if a < b and page == UNMAPPED:
                parts.append(np.full(b - a, UNMAPPED))
            elif a < b:
                parts.append(np.arange(page * PAGE_TOKENS + a, page * PAGE_TOKENS + b))
            at += size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def first_slot(self) -> int | None:
        """Slot of the first token if the tokens are contiguous, None otherwise.

        If leading blocks were released, this is the slot that the first token would have; it may be negative.
        """
        released = self.num_released
        if len(self.ranges) != (2 if released else 1):
            return None
        return self.ranges[-1][0] * PAGE_TOKENS - released

    @property
    def key_ranges(self) -> KeyRanges | None:
        """The two ranges of slots of a table in the pool; None if it has another number of ranges.

        A contiguous table has a prefix of no tokens.
        """
        first = self.first_slot
        if first is not None:
            return KeyRanges(first, 0, first)
        if len(self.ranges) != 2 or self.in_overflow:
            return None
        (first_page, pages), (rest_page, _) = self.ranges
        return KeyRanges(first_page * PAGE_TOKENS, pages * PAGE_TOKENS, rest_page * PAGE_TOKENS)

    def prefix(self, tokens: int) -> BlockTable:
        """Returns a table of the whole blocks of the first ``tokens`` tokens; it adds no references."""
        pages, out = (
            tokens // PAGE_TOKENS,
            BlockTable(first_valid_token=self.first_valid_token, in_overflow=self.in_overflow),
        )
        for page, length in self.ranges:
            if pages > 0:
                out.ranges.append((page, min(length, pages)))
            pages -= length
        return out

    def shift(self, at: int, to: int) -> BlockTable:
        """Returns a table in which the blocks from token ``at`` on begin at token ``to``.

        ``at`` and ``to`` are block boundaries. The tokens from ``at`` to ``to`` are UNMAPPED.
        """
        before, out = at // PAGE_TOKENS, BlockTable(first_valid_token=to, in_overflow=self.in_overflow)
        behind: list[tuple[int, int]] = []
        between = (to - at) // PAGE_TOKENS
        for page, pages in self.ranges:
            here = min(pages, before)
            before -= here
            if here:
                out.ranges.append((page, here))
            if pages > here:
                behind.append((page if page == UNMAPPED else page + here, pages - here))
        if out.ranges and out.ranges[-1][0] == UNMAPPED:
            between += out.ranges.pop()[1]
        if between:
            out.ranges.append((UNMAPPED, between))
        out.ranges += behind
        return out
