"""What a worker does with text that was read in another context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from inference_svc.context_reuse.chunking import Chunker
from inference_svc.context_reuse.rope_shift import KeyRotation
from inference_svc.context_reuse.selectors import DEFAULT_RATIO, DEFAULT_SELECTOR, SELECTORS, TokenSelector

Mode = Literal["off", "verified", "always"]


@dataclass(frozen=True)
class RecomputeSetting:
    """A repair, and the share of approximate tokens that it computes again."""

    selector: TokenSelector
    ratio: float


@dataclass(frozen=True)
class ReusePolicy:
    """How prompts are cut, and whether and how chunks are reused elsewhere. ``rotary`` is None for models whose keys
    cannot be moved, ``repair`` and ``ratio`` None for those that have been verified."""

    chunker: Chunker
    key_rotation: KeyRotation | None
    selector: TokenSelector | None
    ratio: float | None
    mode: Mode = "verified"

    def recompute_setting(self, verdict: ReuseVerdict | None) -> RecomputeSetting | None:
        """How approximate tokens are repaired, or None where they are not reused: without an operator who insists, that
        takes a verification which this very repair has passed."""
        if self.key_rotation is None or self.mode == "off":
            return None
        if self.mode == "always":
            return RecomputeSetting(self.selector or SELECTORS[DEFAULT_SELECTOR], self._ratio(DEFAULT_RATIO))
        if verdict is None or not verdict.passed or verdict.ratio > self._ratio(verdict.ratio) + 1e-9:
            return None
        verified = SELECTORS.get(verdict.strategy)
        if verified is None or self.selector not in (None, verified):
            return None
        return RecomputeSetting(verified, self._ratio(verdict.ratio))

    def _ratio(self, otherwise: float) -> float:
        return otherwise if self.ratio is None else self.ratio
