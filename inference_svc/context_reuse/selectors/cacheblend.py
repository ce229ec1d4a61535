"""The tokens whose keys and values change most (CacheBlend, Yao et al., EuroSys 2025, arXiv:2405.16444).

Layer 0 is computed for all approximate tokens, and keys and values of layer 1; those that deviate most from the
stored ones go on through all other layers.
"""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors.selector import Signals, top


class CacheBlend:
    """Top ``ratio`` by deviation at layer 1."""

    name, depth, wants_deviation, look = "cacheblend", 1, True, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        assert signals.deviation is not None
        return top(plan, ratio, signals.deviation)
