"""CacheBlend: selects tokens by the deviation of their keys and values.

Yao et al., EuroSys 2025, arXiv:2405.16444. Layer 0 and the keys and values of layer 1 are computed for all approximate
tokens. The tokens whose keys and values deviate most from the stored ones are recomputed in all other layers.
"""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals, top_positions


class CacheBlendSelector:
    """Selects the share ``ratio`` of the tokens: those with the largest deviation at layer 1."""

    name, depth, needs_deviation, attention_depth = "cacheblend", 1, True, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        assert signals.deviation is not None
        return top_positions(plan, ratio, signals.deviation)
