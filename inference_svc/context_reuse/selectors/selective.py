"""Tokens on both sides of every seam, where the context changes."""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors.selector import Signals


class Selective:
    """Of every stretch's share, two thirds at its start and one third at its end."""

    name, depth, wants_deviation, look = "selective", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        parts = []
        for s in plan.approximate:
            size = s.end - s.start
            count = round(ratio * size)
            last = count // 3
            first = s.positions[: count - last]
            parts.append(np.union1d(first, s.positions[size - last :]))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
