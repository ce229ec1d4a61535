"""Random tokens: what a budget is worth when it is spent blindly. A baseline for benchmarks."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals


class RandomTokens:
    """The same draw for the same plan."""

    name, depth, needs_deviation, attention_depth = "random", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        positions = plan.approximate_positions
        rng = np.random.default_rng((plan.tokens, len(positions)))
        return np.sort(rng.choice(positions, plan.budget(ratio), replace=False))
