"""Repair strategies that only benchmarks run: baselines for those of the worker.

``random`` says what a budget is worth when it is spent blindly. ``first_k`` recomputes the first tokens of every chunk,
which took the beginning of their old context for the beginning of all (EPIC, Hu et al., arXiv:2410.15332). At r = 0.15
they regain .15 and .18 of the accuracy that reuse without repair loses, ``guided`` .96.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse import selectors
from inference_svc.context_reuse.reuse_plan import Plan, Positions
from inference_svc.context_reuse.selectors import Repair, Signals


class RandomTokens:
    """Random tokens; the same draw for the same plan."""

    name, depth, wants_deviation, look = "random", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        positions = plan.approximate_positions
        rng = np.random.default_rng((plan.tokens, len(positions)))
        return np.sort(rng.choice(positions, plan.budget(ratio), replace=False))


class FirstK:
    """The same share of every stretch, from its start."""

    name, depth, wants_deviation, look = "first_k", 0, False, 0.0

    def choose(self, plan: Plan, ratio: float, signals: Signals) -> Positions:
        parts = [s.positions[: round(ratio * (s.end - s.start))] for s in plan.approximate]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


STRATEGIES: dict[str, Repair] = {**selectors.STRATEGIES, "random": RandomTokens(), "first_k": FirstK()}
"""The worker's strategies and those of this module, by name."""
