"""Chunkers: split a prompt into chunks.

A boundary depends only on the tokens before it and a few after it, so two prompts with the same first tokens have the
same first chunks. Only ``document`` and ``content_defined`` split the same text in the same way at any position.

================  ==============================================================================================
fixed             every N tokens
boundary          every N tokens, moved back to the last end of a sentence within a window
document          before every separator and at segment ends marked by the client; long documents every N
content_defined   where the hash of the last tokens is a local maximum (local maximum chunking: Bjorner,
                  Blass, Gurevich, "Content-dependent chunking for differential compression", JCSS 2010)
================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Strategy = Literal["fixed", "boundary", "document", "content_defined"]

_HASH_WINDOW = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class DocumentMarks:
    """Document structure of a request: token ids of the separator, and ends of marked segments."""

    separator: tuple[int, ...] = ()
    segment_ends: tuple[int, ...] = ()


class Chunker(Protocol):
    """Splits token ids into chunks. ``ends`` returns ascending end indices; the last is ``len(tokens)``."""

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]: ...


@dataclass(frozen=True)
class FixedChunker:
    """Chunks of ``size`` tokens."""

    size: int

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        return _fixed_ends(self.size, 0, len(tokens))


@dataclass(frozen=True)
class SentenceChunker:
    """Chunks of up to ``size`` tokens that end with a sentence.

    If no sentence ends in the last ``window`` of ``size`` tokens, the chunk has ``size`` tokens.
    """

    size: int
    sentence_ends: frozenset[int]
    window: int

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        out, start = [], 0
        while len(tokens) - start > self.size:
            cut = start + self.size
            for at in range(cut, max(start, cut - self.window), -1):
                if tokens[at - 1] in self.sentence_ends:
                    cut = at
                    break
            out.append(cut)
            start = cut
        return [*out, len(tokens)] if len(tokens) > start else out


@dataclass(frozen=True)
class DocumentChunker:
    """One chunk per document; documents of more than ``max_tokens`` tokens are split further."""

    separator: tuple[int, ...]
    max_tokens: int

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        separator = marks.separator or self.separator
        cuts = set(marks.segment_ends) | set(_occurrences(tokens, separator))
        out, start = [], 0
        for end in sorted(c for c in cuts | {len(tokens)} if 0 < c <= len(tokens)):
            out += _fixed_ends(self.max_tokens, start, end)
            start = end
        return out


@dataclass(frozen=True)
class ContentDefinedChunker:
    """Chunks that end at local maxima of a rolling hash.

    A local maximum is the largest hash of ``reach`` positions on both sides. No boundary depends on the one before it,
    so the same text has the same boundaries after its first ``reach`` tokens. Only the last chunk may be shorter than
    ``reach`` tokens; the average is ``2 * reach + 1`` tokens.
    """

    reach: int
    max_tokens: int

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        out: list[int] = []
        start, reach = 0, self.reach
        if len(tokens) > 2 * reach:
            hashes = rolling_hashes(tokens)
            around = sliding_window_view(hashes, 2 * reach + 1).max(1)
            for cut in np.flatnonzero(hashes[reach:-reach] == around) + reach:
                if cut - start >= reach:
                    out += _fixed_ends(self.max_tokens, start, int(cut))
                    start = int(cut)
        return out + _fixed_ends(self.max_tokens, start, len(tokens))


def rolling_hashes(tokens: Sequence[int]) -> NDArray[np.uint64]:
    """Compute hashes ``[len(tokens) + 1]``: hash ``i`` covers the ``_HASH_WINDOW`` tokens before index ``i``."""
    mixed = (np.asarray(tokens, np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    out = np.zeros(len(tokens) + 1, np.uint64)
    if len(tokens) < _HASH_WINDOW:
        return out
    total = np.zeros(len(tokens) - _HASH_WINDOW + 1, np.uint64)
    for i in range(_HASH_WINDOW):
        total = total * np.uint64(0x100000001B3) + mixed[i : i + len(total)]
    total ^= total >> np.uint64(32)
    out[_HASH_WINDOW:] = total * _MIX
    return out


def new_chunker(strategy: Strategy, size: int, separator: Sequence[int], sentence_ends: frozenset[int]) -> Chunker:
    """Build the chunker of a worker's settings; ``size`` is the maximum or average number of tokens."""
    if strategy == "fixed":
        return FixedChunker(size)
    if strategy == "boundary":
        return SentenceChunker(size, sentence_ends, max(1, size // 4))
    if strategy == "document":
        return DocumentChunker(tuple(separator), min(4 * size, MAX_CHUNK_TOKENS))
    return ContentDefinedChunker(max(1, 3 * size // 8), min(4 * size, MAX_CHUNK_TOKENS))


def _fixed_ends(size: int, start: int, end: int) -> list[int]:
    return [*range(start + size, end, size), end] if end > start else []


def _occurrences(tokens: Sequence[int], separator: tuple[int, ...]) -> list[int]:
    if not separator or len(separator) > len(tokens):
        return []
    array = np.asarray(tokens)
    hit = np.ones(len(array) - len(separator) + 1, bool)
    for i, token in enumerate(separator):
        hit &= array[i : i + len(hit)] == token
    return [int(i) for i in np.flatnonzero(hit)]
