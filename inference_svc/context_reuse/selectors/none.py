"""Approximate tokens as they are: for measuring what repair is worth, and for text that stands alone."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals


class NoTokens:
    """Computes nothing again."""

    name, depth, needs_deviation, attention_depth = "none", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        return np.empty(0, np.int64)
