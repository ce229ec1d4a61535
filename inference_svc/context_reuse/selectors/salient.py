"""Selects tokens by attention times deviation.

Attention tells which tokens the question reads, deviation which of them are wrong; only their product tells which wrong
tokens are read. Two layers are computed for all approximate tokens, exactly, which gives the deviation of keys and
values in layers 1 and 2; then the question is read once over the stored keys. On real language models this selects as
well as knowledge of the true keys and values would (``docs/adr/049-salient-repair.md``), where either factor alone
regains half as much.
"""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals, top_positions


class SalientSelector:
    """Top ``ratio`` by the question's attention times the squared deviation in layers 1 and 2."""

    name, depth, needs_deviation, attention_depth = "salient", 2, True, 1.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        assert signals.attention is not None
        assert signals.deviation is not None
        return top_positions(plan, ratio, signals.attention * signals.deviation**2)
