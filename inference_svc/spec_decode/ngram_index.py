"""N-gram index: places of n-grams in a token sequence.

For LONG_NGRAM and SHORT_NGRAM tokens, a hash table maps each n-gram to its last place, and a chain links each place to
the n-gram's previous place, like the match finder of LZ77 (RFC 1951, section 4). The search compares the tokens of each
candidate, so a hash collision costs only one step of the search. The index takes 28 to 44 bytes per token of capacity.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONG_NGRAM, SHORT_NGRAM = 4, 2
# Maximum length of a measured match, and maximum number of places of a chain that a search compares.
MAX_MATCHED, _STEPS = 32, 16
_FACTOR, _WORD = 0x9E3779B1, (1 << 32) - 1
# More new tokens than this are indexed with NumPy.
_MANY = 48


@dataclass(frozen=True)
class NgramMatch:
    """Match of a query's last ``length`` tokens; their last token is at ``place`` of the index."""

    place: int
    length: int


class NgramIndex:
    """Index of a token sequence of up to ``capacity`` tokens. ``add`` raises IndexError if it is full."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._mask = (1 << max(6, (2 * capacity - 1).bit_length())) - 1
        self._tokens = array("i", bytes(4 * capacity))
        # By n-gram length: the last place of each hash, and the previous place of each place.
        self._heads = {n: _nowhere(self._mask + 1) for n in (LONG_NGRAM, SHORT_NGRAM)}
        self._before = {n: _nowhere(capacity) for n in (LONG_NGRAM, SHORT_NGRAM)}

    def add(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        start, end = self.length, self.length + len(tokens)
        if end > self.capacity:
            raise IndexError(f"{end} tokens into a room for {self.capacity}")
        self._tokens[start:end] = array("i", tokens)
        self.length = end
        if end - start > _MANY:
            for n in (LONG_NGRAM, SHORT_NGRAM):
                self._enter(n, start, end)
            return
        for place in range(start, end):
            for n in (LONG_NGRAM, SHORT_NGRAM):
                if place + 1 >= n:
                    at = self._hash(self._tokens[place + 1 - n : place + 1])
                    heads = self._heads[n]
                    self._before[n][place] = heads[at]
                    heads[at] = place

    def find(self, tail: Sequence[int]) -> NgramMatch | None:
        """Returns the longest match of the last tokens; of equally long ones, the latest. None below SHORT_NGRAM."""
        return next(iter(self.find_many(tail, 1)), None)

    def find_many(self, tail: Sequence[int], most: int) -> list[NgramMatch]:
        """Returns up to ``most`` matches with different next tokens, longest first.

        For each next token it returns the longest match, and the latest of equally long matches.
        """
        best: dict[int, NgramMatch] = {}
        longest, whole = 0, min(len(tail), MAX_MATCHED)
        for n in (LONG_NGRAM, SHORT_NGRAM):
            if len(tail) < n or len(best) >= most:
                continue
            place = self._heads[n][self._hash(tail[-n:])]
            for _ in range(_STEPS):
                if place < 0 or (most == 1 and longest == whole):
                    break
                if place + 1 < self.length:
                    length = self._matched(tail, place)
                    if length >= n and (most > 1 or length > longest):
                        longest, token = max(length, longest), self._tokens[place + 1]
                        if token not in best or length > best[token].length:
                            best[token] = NgramMatch(place, length)
                place = self._before[n][place]
        return sorted(best.values(), key=lambda match: (-match.length, -match.place))[:most]

    def follow(self, place: int, most: int) -> list[int]:
        """Returns ``most`` tokens after a place. Repeats the following tokens if they are fewer; empty if none."""
        found = self._tokens[place + 1 : min(place + 1 + most, self.length)].tolist()
        period = len(found)
        while 0 < len(found) < most:
            found.append(found[-period])
        return found

    def _matched(self, tail: Sequence[int], place: int) -> int:
        tokens, length = self._tokens, 0
        for token in reversed(tail[-MAX_MATCHED:]):
            if place < length or tokens[place - length] != token:
                break
            length += 1
        return length

    def _hash(self, run: Sequence[int]) -> int:
        word = 0
        for token in run:
            word = (word * _FACTOR + token) & _WORD
        return (word ^ (word >> 15)) & self._mask

    def _enter(self, n: int, start: int, end: int) -> None:
        """Indexes the places ``start`` to ``end`` with NumPy, with the result of ``add``'s loop."""
        first = max(start, n - 1)
        if first >= end:
            return
        tokens = np.frombuffer(self._tokens, np.int32)[first + 1 - n : end].astype(np.uint64)
        words: NDArray[np.uint64] = np.zeros(end - first, np.uint64)
        for i in range(n):
            words = (words * np.uint64(_FACTOR) + tokens[i : i + end - first]) & np.uint64(_WORD)
        at = ((words ^ (words >> np.uint64(15))) & np.uint64(self._mask)).astype(np.int64)
        places = np.arange(first, end, dtype=np.int32)
        heads, before = np.frombuffer(self._heads[n], np.int32), np.frombuffer(self._before[n], np.int32)
        order = np.argsort(at, kind="stable")
        hashes, ordered = at[order], places[order]
        again = np.concatenate(([False], hashes[1:] == hashes[:-1]))
        before[ordered] = np.where(again, np.concatenate(([-1], ordered[:-1])), heads[hashes])
        last = np.concatenate((hashes[1:] != hashes[:-1], [True]))
        heads[hashes[last]] = ordered[last]


def _nowhere(size: int) -> array[int]:
    return array("i", [-1]) * size
