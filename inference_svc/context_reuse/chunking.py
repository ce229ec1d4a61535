"""Chunkers: split a prompt into chunks.

A boundary depends only on the tokens before it and a few after it, so two prompts with the same first tokens have the
same first chunks. Only ``document`` and ``content_defined`` split the same text in the same way at any position.

================  ==============================================================================================
fixed             every N tokens
boundary          every N tokens, moved back to the last end of a sentence within a window
document          at the client's marks; a document that is too long is also split every N tokens
content_defined   at the client's marks, at the ends of paragraphs and chat messages, and between these cuts where the
                  hash of the last tokens is a local maximum (local maximum chunking: Bjorner, Blass, Gurevich,
                  "Content-dependent chunking for differential compression", JCSS 2010)
================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from inference_svc.context_reuse.text_structure import TextStructure

Strategy = Literal["fixed", "boundary", "document", "content_defined"]

_HASH_WINDOW = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
# There is no cut between two paragraphs that are both shorter than this, so that the lines of a list stay together.
_MIN_PARAGRAPH = 24
# The same for separators. Shorter chunks are never reused at another position.
_MIN_DOCUMENT = 8


@dataclass(frozen=True)
class DocumentMarks:
    """Document structure of a request: token ids of the separator, and ends of marked segments.

    ``prompt_end`` is the number of prompt tokens, after which the tokens of an answer may follow; 0 without an answer.
    """

    separator: tuple[int, ...] = ()
    segment_ends: tuple[int, ...] = ()
    prompt_end: int = 0


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
    """One chunk per document; documents of more than ``max_tokens`` tokens are split further.

    The end of the prompt is a cut, too: the answer is not part of the last document.
    """

    separator: tuple[int, ...]
    max_tokens: int

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        cuts = _marked_cuts(tokens, marks, self.separator) | {min(marks.prompt_end, len(tokens)), 0, len(tokens)}
        return [end for a, b in pairwise(sorted(cuts)) for end in _fixed_ends(self.max_tokens, a, b)]


@dataclass(frozen=True)
class LocalMaximumChunker:
    """Chunks that end at local maxima of a rolling hash.

    A local maximum is the largest hash of ``reach`` positions on both sides. No boundary depends on the previous one,
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


@dataclass(frozen=True)
class ContentDefinedChunker:
    """Cuts at marks and paragraph ends; ``inside`` splits each part between two cuts.

    So a text between two cuts has the same chunks at any position. The end of the prompt is not a cut, because in the
    next turn of a conversation this position is in the middle of the prompt.
    """

    separator: tuple[int, ...]
    structure: TextStructure
    inside: LocalMaximumChunker

    def ends(self, tokens: Sequence[int], marks: DocumentMarks = DocumentMarks()) -> list[int]:
        marked = _marked_cuts(tokens, marks, self.separator) | {0, len(tokens)}
        cuts = np.union1d(np.asarray(sorted(marked), np.int64), self.structure.ends(np.asarray(tokens, np.int64)))
        gaps = np.diff(cuts)
        longer = np.maximum(np.append(gaps, 0), np.append(0, gaps)) >= _MIN_PARAGRAPH
        kept = [int(cut) for cut, keep in zip(cuts, longer, strict=True) if keep or int(cut) in marked]
        return [a + end for a, b in pairwise(kept) for end in self.inside.ends(tokens[a:b])]


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


def new_chunker(
    strategy: Strategy,
    size: int,
    separator: Sequence[int] = (),
    sentence_ends: frozenset[int] = frozenset(),
    structure: TextStructure | None = None,
) -> Chunker:
    """Build the chunker of a worker's settings; ``size`` is the maximum or average number of tokens.

    ``structure`` finds paragraph ends in token ids. Without it, ``content_defined`` does not cut at paragraphs.
    """
    if strategy == "fixed":
        return FixedChunker(size)
    if strategy == "boundary":
        return SentenceChunker(size, sentence_ends, max(1, size // 4))
    longest = min(4 * size, MAX_CHUNK_TOKENS)
    if strategy == "document":
        return DocumentChunker(tuple(separator), longest)
    inside = LocalMaximumChunker(max(1, 3 * size // 8), longest)
    return ContentDefinedChunker(tuple(separator), structure or TextStructure(), inside)


def separator_cuts(starts: Sequence[int], tokens: int) -> list[int]:
    """Return the starts of separators that are cuts: those with a long part before or after them.

    ``starts`` are all separators of a prompt of ``tokens`` tokens.
    """
    around = zip([0, *starts], starts, [*starts[1:], tokens], strict=False)
    return [at for before, at, after in around if max(at - before, after - at) >= _MIN_DOCUMENT]


def _marked_cuts(tokens: Sequence[int], marks: DocumentMarks, separator: tuple[int, ...]) -> set[int]:
    """Return the ends of marked segments, and the cuts at separators. A separator in ``marks`` replaces the other."""
    ends = {end for end in marks.segment_ends if end <= len(tokens)}
    return ends | set(separator_cuts(_occurrences(tokens, marks.separator or separator), len(tokens)))


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
