"""Repair strategies that only benchmarks use, as baselines for the worker's strategies.

``random`` recomputes random tokens. ``first_k`` recomputes the first tokens of every chunk (EPIC, Hu et al.,
arXiv:2410.15332): a model attends strongly to the first tokens of a prompt, and these tokens were wrongly computed as
such. Of the accuracy that reuse without repair loses, ``random`` regains .15 at r = 0.15, ``first_k`` .18, and
``guided`` .96.
"""

from __future__ import annotations

import numpy as np

from inference_svc.context_reuse import selectors
from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors import SelectionSignals, TokenSelector


class RandomTokens:
    """Strategy that recomputes random tokens. Equal plans get equal tokens."""

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
"""The worker's strategies and the strategies of this module, by name."""
