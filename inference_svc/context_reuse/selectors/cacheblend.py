"""Selects tokens by KV deviation (CacheBlend, Yao et al., EuroSys 2025, arXiv:2405.16444).

Layer 0 is computed for all approximate tokens, and keys and values of layer 1; the tokens that deviate most from the
stored ones are recomputed in all other layers.
"""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals, top_positions


class CacheBlendSelector:
    """Top ``ratio`` by deviation at layer 1."""

    name, depth, needs_deviation, attention_depth = "cacheblend", 1, True, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        assert signals.deviation is not None
        return top_positions(plan, ratio, signals.deviation)
