"""What the question attends to, and what changes deeper down.

Deviation at layer 1 sees only what one layer of attention changes, and misses tokens that take up other documents in
the layers after it. So a few layers are computed for all approximate tokens, exactly, before the choice. Half of it
goes to the tokens that the question attends to most, when it is read once with the stored keys (compare ProphetKV and
the like); the other half to those that deviate most. How many layers it takes is the model's: ``kvsidecar verify``
measures ``guided`` (3), ``guided_4`` and ``guided_6``. Measured in ``docs/decisions.md``.
"""

from __future__ import annotations

import numpy as np

from inference_svc.reuse.plan import Plan, Positions
from inference_svc.reuse.strategies.base import Signals, top


class Guided:
    """Top ``ratio / 2`` by the question's attention, the rest by deviation after ``depth`` layers."""

    wants_attention = True

    def __init__(self, depth: int = 3) -> None:
        self.depth = depth
        self.name = "guided" if depth == 3 else f"guided_{depth}"

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        assert signals.deviation is not None
        assert signals.attention is not None
        looked_at = top(plan, ratio / 2, signals.attention)
        positions = plan.approximate_positions
        others = np.where(np.isin(positions, looked_at), -1.0, signals.deviation)
        rest = plan.budget(ratio) - len(looked_at)
        return np.union1d(looked_at, positions[np.argsort(-others, kind="stable")[:rest]])
