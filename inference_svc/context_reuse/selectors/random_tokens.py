"""Random tokens: what a budget is worth when it is spent blindly. A baseline for benchmarks."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors.selector import Signals


class RandomTokens:
    """The same draw for the same plan."""

    name, depth, wants_deviation, look = "random", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        positions = plan.approximate_positions
        rng = np.random.default_rng((plan.tokens, len(positions)))
        return np.sort(rng.choice(positions, plan.budget(ratio), replace=False))
