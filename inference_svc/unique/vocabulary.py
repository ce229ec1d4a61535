"""A vocabulary's tokens by their bytes: which of them begin alike, and which can begin an item.

An item begins behind ``[`` or ``,``. Where nothing that is being written can become a duplicate, only tokens with one
of them matter, and within a string only those that end it before.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

_BEGINS = re.compile(rb"[\[,]")
_ENDS_AND_BEGINS = re.compile(rb"\".*[\[,]", re.DOTALL)
# Ends what stands before a value in a text, and begins a second item in it.
_CROSSES = re.compile(rb"[:>]\s.*\[.*,", re.DOTALL)
# What a token that text cannot spell is shown by.
_SPECIAL = 0xFF


class Vocabulary:
    """Immutable; takes a second to make for a large vocabulary."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        for token in range(len(texts)):
            if tokenizer.is_special_token(token):
                texts[token] = b""
        self.texts = texts
        order = sorted((text, token) for token, text in enumerate(texts) if text)
        self._sorted = [text for text, _ in order]
        self._tokens = np.array([token for _, token in order], np.int64)
        self.beginning = self._such(_BEGINS)
        self.beginning_in_string = self._such(_ENDS_AND_BEGINS)
        self.crossing = self._such(_CROSSES)

    def _such(self, pattern: re.Pattern[bytes]) -> NDArray[np.bool_]:
        """``[tokens]``"""
        return np.array([pattern.search(text) is not None for text in self.texts])

    def beginning_with(self, prefix: bytes) -> tuple[NDArray[np.int64], int]:
        """The tokens that begin with some bytes, and how many of them, the first ones, are nothing more."""
        low = bisect_left(self._sorted, prefix)
        high = self._end(prefix, low)
        same = low
        while same < high and self._sorted[same] == prefix:
            same += 1
        return self._tokens[low:high], same - low

    def next_bytes(self, prefix: bytes) -> Iterator[int]:
        """The bytes that follow a prefix in some token, each once."""
        low = bisect_left(self._sorted, prefix)
        high, size = self._end(prefix, low), len(prefix)
        while low < high:
            text = self._sorted[low]
            if len(text) == size:
                low += 1
                continue
            yield text[size]
            low = self._end(text[: size + 1], low, high)

    def _end(self, prefix: bytes, low: int, high: int | None = None) -> int:
        """Behind the last that begins so."""
        after = prefix.rstrip(b"\xff")
        if not after:
            return len(self._sorted) if high is None else high
        beyond = after[:-1] + bytes((after[-1] + 1,))
        return bisect_left(self._sorted, beyond, low, len(self._sorted) if high is None else high)
