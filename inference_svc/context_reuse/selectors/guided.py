"""Guided selector: selects tokens by the attention of the question.

The lowest layers are computed for all approximate tokens; the results of these layers are exact. Then the question is
computed once over the stored keys. The tokens to which any head pays high attention are recomputed, each together with
the token before it: a token that summarizes a statement depends on the tokens before it. SnapKV (arXiv:2404.14469) also
pools scores over neighbours. ``docs/adr/027-guided-question-attention.md`` compares selection by attention, selection
by deviation, and mixtures of both.

The number of lowest layers that associate related tokens depends on the model. ``kvsidecar verify`` measures ``guided``
(2 layers), ``guided_4`` and ``guided_8``, and keeps the cheapest selector that passes.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals, top_positions


class GuidedSelector:
    """Selects tokens by the question's attention.

    After ``depth`` layers, it selects the share ``ratio`` of the approximate tokens: those with the most attention.
    """

    # In the built-in model, attention is informative well before the last layer.
    needs_deviation, attention_depth = False, 2 / 3

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth
        self.name = "guided" if depth == 2 else f"guided_{depth}"

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        assert signals.attention is not None
        score, positions = signals.attention.copy(), plan.approximate_positions
        follows = np.diff(positions) == 1
        score[:-1] = np.maximum(score[:-1], np.where(follows, signals.attention[1:], 0))
        return top_positions(plan, ratio, score)
