"""Repair strategies that only benchmarks run: baselines for those of the worker.

``random`` measures the value of a budget that is spent without a choice. ``first_k`` recomputes the first tokens of
every chunk, which took the beginning of their old context for the beginning of all (EPIC, Hu et al., arXiv:2410.15332).
At r = 0.15 they regain .15 and .18 of the accuracy that reuse without repair loses, ``guided`` .96.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse import selectors
from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors import SelectionSignals, TokenSelector


class RandomTokens:
    """Random tokens; the same draw for the same plan."""

    name, depth, needs_deviation, attention_depth = "random", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        positions = plan.approximate_positions
        rng = np.random.default_rng((plan.tokens, len(positions)))
        return np.sort(rng.choice(positions, plan.budget(ratio), replace=False))


class FirstK:
    """Strategy that recomputes the same share of every approximate segment, from its start."""

    name, depth, needs_deviation, attention_depth = "first_k", 0, False, 0.0

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        parts = [s.positions[: round(ratio * (s.end - s.start))] for s in plan.approximate]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


STRATEGIES: dict[str, TokenSelector] = {**selectors.SELECTORS, "random": RandomTokens(), "first_k": FirstK()}
"""The worker's strategies and those of this module, by name."""
