"""A grammar's matcher that knows what the grammar cannot say: arrays without duplicates.

What is drawn is drawn from the tokens that the grammar allows and a ``Watch`` over the text leaves.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from inference_svc.unique.watch import Watch


class UniqueMatcher:
    """Stands for an ``LLMatcher`` of a JSON schema. Belongs to one thread at a time."""

    def __init__(self, tokens: LLMatcher, watch: Watch, texts: list[bytes]) -> None:
        """Takes over ``tokens`` and ``watch``, which stand at the beginning of the same grammar without
        ``uniqueItems``; ``texts`` are those of the tokens."""
        self._tokens, self._watch, self._texts = tokens, watch, texts
        self._stuck = False

    def deep_copy(self) -> UniqueMatcher:
        """Another one at the same place."""
        return UniqueMatcher(self._tokens.deep_copy(), self._watch.another(), self._texts)

    def is_stopped(self) -> bool:
        return self._tokens.is_stopped()

    def is_error(self) -> bool:
        return self._stuck or self._tokens.is_error() or self._watch.failed

    def stop_reason(self) -> str:
        return "NoItemLeft" if self._stuck else self._tokens.stop_reason()

    def compute_bitmask(self) -> bytes:
        """A bit for each token that may come next."""
        mask = self._tokens.compute_bitmask()
        if self._tokens.is_error() or self._tokens.is_stopped():
            return mask
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        denied = self._watch.denied(bits[: len(self._texts)].astype(bool))
        if not denied:
            return mask
        bits[list(denied)] = 0
        self._stuck = not bits.any()
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        """Goes on with a token; False when that is not allowed, and nothing is from then on."""
        text = self._texts[token]
        if not self._watch.goes(text) or not self._tokens.consume_token(token):
            self._stuck = True
            return False
        return self._watch.take(text)
