"""The first tokens of every chunk: those that took the beginning of their old context for the beginning of all.

EPIC, Hu et al., arXiv:2410.15332.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors.selector import Signals


class FirstK:
    """The same share of every stretch, from its start."""

    name, depth, wants_deviation, look = "first_k", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        parts = [s.positions[: round(ratio * (s.end - s.start))] for s in plan.approximate]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
