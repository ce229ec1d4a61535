"""The first tokens of every chunk: those that took the beginning of their old context for the beginning of all.

EPIC, Hu et al., arXiv:2410.15332.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals


class FirstTokens:
    """The same share of every stretch, from its start."""

    name, depth, needs_deviation, attention_depth = "first_k", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        parts = [s.positions[: round(ratio * (s.end - s.start))] for s in plan.approximate]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
