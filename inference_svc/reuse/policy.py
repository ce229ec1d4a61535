"""What a worker does with text that was read in another context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from inference_svc.reuse.chunking import Chunker
from inference_svc.reuse.placement import Rotary
from inference_svc.reuse.strategies import Repair

Mode = Literal["off", "verified", "always"]


@dataclass(frozen=True)
class ReusePolicy:
    """How prompts are cut, and whether and how chunks are reused elsewhere. ``rotary`` is None for models whose keys
    cannot be moved."""

    chunker: Chunker
    rotary: Rotary | None
    repair: Repair
    ratio: float
    mode: Mode = "verified"

    def allows(self, verdict: ReuseVerdict | None) -> bool:
        """Whether approximate reuse is on: only where a verification of this very repair has passed, unless the
        operator insists."""
        if self.rotary is None or self.mode == "off":
            return False
        if self.mode == "always":
            return True
        return (
            verdict is not None
            and verdict.passed
            and verdict.strategy == self.repair.name
            and verdict.ratio <= self.ratio + 1e-9
        )
