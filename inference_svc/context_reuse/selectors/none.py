"""Approximate tokens as they are: for measuring what repair is worth, and for text that stands alone."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors.selector import Signals


class NoRepair:
    """Computes nothing again."""

    name, depth, wants_deviation, look = "none", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        return np.empty(0, np.int64)
