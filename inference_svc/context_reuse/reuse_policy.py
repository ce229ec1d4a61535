"""What a worker does with text that was read in another context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from inference_svc.context_reuse.chunking import Chunker
from inference_svc.context_reuse.rope_shift import Rotary
from inference_svc.context_reuse.selectors import DEFAULT, DEFAULT_RATIO, STRATEGIES, Repair

Mode = Literal["off", "verified", "always"]


@dataclass(frozen=True)
class RepairSetting:
    """A repair, and the share of approximate tokens that it computes again."""

    repair: Repair
    ratio: float


@dataclass(frozen=True)
class ReusePolicy:
    """How prompts are cut, and whether and how chunks are reused elsewhere. ``rotary`` is None for models whose keys
    cannot be moved, ``repair`` and ``ratio`` None for those that have been verified."""

    chunker: Chunker
    rotary: Rotary | None
    repair: Repair | None
    ratio: float | None
    mode: Mode = "verified"

    def repair_for(self, verdict: ReuseVerdict | None) -> RepairSetting | None:
        """How approximate tokens are repaired, or None where they are not reused: without an operator who insists, that
        takes a verification which this very repair has passed."""
        if self.rotary is None or self.mode == "off":
            return None
        if self.mode == "always":
            return RepairSetting(self.repair or STRATEGIES[DEFAULT], self._ratio(DEFAULT_RATIO))
        if verdict is None or not verdict.passed or verdict.ratio > self._ratio(verdict.ratio) + 1e-9:
            return None
        verified = STRATEGIES.get(verdict.strategy)
        if verified is None or self.repair not in (None, verified):
            return None
        return RepairSetting(verified, self._ratio(verdict.ratio))

    def _ratio(self, otherwise: float) -> float:
        return otherwise if self.ratio is None else self.ratio
