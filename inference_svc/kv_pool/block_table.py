"""Where a sequence's tokens lie in the pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 32
# torch's attention reads keys in blocks of this many; see attention.py.
KEY_BLOCK = 512
# The first page of pages that are not held.
UNMAPPED = -1


@dataclass(eq=False)
class BlockTable:
    """The pages of one sequence as ``(first page, pages)`` ranges in the order of its tokens. Those at NOWHERE are not
    held. What lies before the token ``since`` is not there for layers with a sliding window. Pages of a table that is
    ``apart`` are the overflow's."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    since: int = 0
    apart: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that fit, with those whose pages are not held."""
        return sum(pages for _, pages in self.ranges) * BLOCK_TOKENS

    @property
    def held(self) -> list[tuple[int, int]]:
        """The ranges whose pages are."""
        return [one for one in self.ranges if one[0] != UNMAPPED]

    @property
    def left(self) -> int:
        """Leading tokens whose pages are not held."""
        return self.ranges[0][1] * BLOCK_TOKENS if self.ranges and self.ranges[0][0] == UNMAPPED else 0

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Pool slots of the tokens ``start`` to ``end``, ``[end - start]``; NOWHERE for those whose pages are not
        held."""
        if len(self.ranges) == 1 and not self.left:
            first = self.ranges[0][0] * BLOCK_TOKENS
            return np.arange(first + start, first + end)
        parts, at = [], 0
        for page, pages in self.ranges:
            size = pages * BLOCK_TOKENS
            a, b = max(start - at, 0), min(end - at, size)
            if a < b and page == UNMAPPED:
                parts.append(np.full(b - a, UNMAPPED))
            elif a < b:
                parts.append(np.arange(page * BLOCK_TOKENS + a, page * BLOCK_TOKENS + b))
            at += size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def first_slot(self) -> int | None:
        """Where the first token lies, or would if its page were still held, when the tokens lie in one piece. It may be
        negative then."""
        left = self.left
        if len(self.ranges) != (2 if left else 1):
            return None
        return self.ranges[-1][0] * BLOCK_TOKENS - left

    def head(self, tokens: int) -> BlockTable:
        """The pages of the first ``tokens`` tokens, whole ones, in a table that counts as nobody's."""
        pages, out = tokens // BLOCK_TOKENS, BlockTable(since=self.since, apart=self.apart)
        for page, length in self.ranges:
            if pages > 0:
                out.ranges.append((page, min(length, pages)))
            pages -= length
        return out

    def spread(self, at: int, to: int) -> BlockTable:
        """The same pages, those of the tokens from ``at`` on for those from ``to`` on; both begin a page. Nothing is
        held in between."""
        before, out = at // BLOCK_TOKENS, BlockTable(since=to, apart=self.apart)
        behind: list[tuple[int, int]] = []
        between = (to - at) // BLOCK_TOKENS
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
