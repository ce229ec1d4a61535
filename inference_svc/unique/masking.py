"""What a matcher is that takes tokens out of a grammar's masks, whichever it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from llguidance import LLMatcher

from inference_svc.unique.watch import Allowed


class MaskingMatcher(ABC):
    """Stands for an ``LLMatcher``. Belongs to one thread at a time."""

    def __init__(self, tokens: LLMatcher, texts: list[bytes]) -> None:
        """Takes over ``tokens``; ``texts`` are those of the vocabulary's tokens."""
        self._tokens, self._texts = tokens, texts
        self._stuck = False

    @abstractmethod
    def _denied(self, allowed: Allowed) -> set[int]:
        """The tokens, of those that are ``allowed``, that must not come next."""

    def is_stopped(self) -> bool:
        return self._tokens.is_stopped()

    def is_error(self) -> bool:
        return self._stuck or self._tokens.is_error()

    def stop_reason(self) -> str:
        return "NoItemLeft" if self._stuck else self._tokens.stop_reason()

    def compute_bitmask(self) -> bytes:
        """A bit for each token that may come next."""
        mask = self._tokens.compute_bitmask()
        if self._tokens.is_error() or self._tokens.is_stopped():
            return mask
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        denied = self._denied(bits[: len(self._texts)].astype(bool))
        if not denied:
            return mask
        bits[list(denied)] = 0
        self._stuck = not bits.any()
        return np.packbits(bits, bitorder="little").tobytes()
