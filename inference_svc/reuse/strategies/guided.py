"""What the question attends to, and what changes: deviation weighted by attention.

A token that deviates matters only if somebody looks at it, and one that is looked at only if it deviates. The
question is read once with the stored keys to see where it looks (compare ProphetKV and the like); the tokens
that go on are those with the largest product of both.
"""

from __future__ import annotations

import numpy as np

from inference_svc.reuse.plan import Plan, Positions
from inference_svc.reuse.strategies.base import Signals, top


class Guided:
    """Top ``ratio`` by ``sqrt(attention) * deviation`` at layer 1."""

    name, depth, wants_attention = "guided", 1, True

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        assert signals.deviation is not None
        assert signals.attention is not None
        return top(plan, ratio, np.sqrt(signals.attention) * signals.deviation)
