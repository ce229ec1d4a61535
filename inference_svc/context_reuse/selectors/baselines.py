"""Baseline selectors without measurements: no tokens, and the edges of every chunk."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals


class NoTokens:
    """Selects no tokens: the baseline of a verification, and sufficient for text that needs no context."""

    name, depth, needs_deviation, attention_depth = "none", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        return np.empty(0, np.int64)


class ChunkEdges:
    """Selects tokens at both ends of each relocated span.

    The context of a span differs most at its ends. Two thirds of a span's selected tokens are at its start, one third
    at its end.
    """

    name, depth, needs_deviation, attention_depth = "selective", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        parts = []
        for s in plan.approximate:
            size = s.end - s.start
            count = round(ratio * size)
            last = count // 3
            first = s.positions[: count - last]
            parts.append(np.union1d(first, s.positions[size - last :]))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
