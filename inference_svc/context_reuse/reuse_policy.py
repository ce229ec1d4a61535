"""Reuse policy: a worker's settings for approximate reuse."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from inference_svc.context_reuse.chunking import Chunker
from inference_svc.context_reuse.rope_shift import RopeShift
from inference_svc.context_reuse.selectors import DEFAULT_RATIO, DEFAULT_SELECTOR, SELECTORS, TokenSelector


@dataclass(frozen=True)
class RecomputeSetting:
    """A selector, and the share of approximate tokens to recompute."""

    selector: TokenSelector
    ratio: float


@dataclass(frozen=True)
class ReusePolicy:
    """Chunker, conditions for approximate reuse, and the share of tokens to recompute.

    ``key_rotation`` is None for a model without RoPE shift. If ``selector`` or ``ratio`` is None, the verdict's value
    is used. ``enabled`` is the default for requests that do not choose. With ``unverified``, reuse needs no verdict.
    """

    chunker: Chunker
    key_rotation: RopeShift | None
    selector: TokenSelector | None
    ratio: float | None
    enabled: bool = False
    unverified: bool = False

    def recompute_setting(self, verdict: ReuseVerdict | None) -> RecomputeSetting | None:
        """Selector and ratio for approximate tokens; None if approximate tokens may not be reused.

        Without ``unverified``, the selector must be the one that passed verification, and the ratio must be at least
        the verified one.
        """
        if self.key_rotation is None:
            return None
        if self.unverified:
            return RecomputeSetting(self.selector or SELECTORS[DEFAULT_SELECTOR], self._ratio(DEFAULT_RATIO))
        if verdict is None or not verdict.passed or verdict.ratio > self._ratio(verdict.ratio) + 1e-9:
            return None
        verified = SELECTORS.get(verdict.strategy)
        if verified is None or self.selector not in (None, verified):
            return None
        return RecomputeSetting(verified, self._ratio(verdict.ratio))

    def _ratio(self, otherwise: float) -> float:
        return otherwise if self.ratio is None else self.ratio
