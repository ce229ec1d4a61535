"""Selects tokens by the attention of the question.

The lowest layers are computed for all approximate tokens, exactly. Then the question is read once over the stored keys,
and the tokens with high attention from some head are recomputed, each with the token before it: a token that summarizes
a statement takes it from there (SnapKV, arXiv:2404.14469, pools scores over neighbours likewise). Measured against
deviation, and against mixtures of both, in ``docs/adr/027-guided-question-attention.md``.

The number of lowest layers depends on the model: enough to associate related tokens. ``kvsidecar verify`` measures
``guided`` (2), ``guided_4`` and ``guided_8``, and keeps the first that passes.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors.selector import SelectionSignals, top_positions


class GuidedSelector:
    """Top ``ratio`` by the question's attention after ``depth`` layers."""

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
