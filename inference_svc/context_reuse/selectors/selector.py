"""What a repair strategy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan


@dataclass(frozen=True)
class SelectionSignals:
    """What was measured of the approximate tokens, each ``[approximate tokens]`` in the order of their positions.

    ``deviation``: how far keys and values of layers 1 to the strategy's depth lie from the stored ones: the root of the
    sum of squares, each layer's keys and values relative to their mean norm.
    ``attention``: how hard attention heads look at a token when they read the question: over heads and layers, the sum
    of squares of the largest weight that any of the question's tokens gives it.
    """

    deviation: NDArray[Any] | None = None
    attention: NDArray[Any] | None = None


class TokenSelector(Protocol):
    """Chooses the approximate tokens to compute again.

    ``depth`` layers are computed for all approximate tokens before the choice; 0 when nothing need be measured.
    ``wants_deviation`` says whether that signal is measured. ``look`` is the share of layers through which the question
    is read over the stored keys, to see where it looks; 0 when attention need not be measured.
    """

    name: str
    depth: int
    needs_deviation: bool
    attention_depth: float

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        """Rising positions, about ``ratio`` of the approximate ones; all of them for 1."""
        ...


def top_positions(plan: ReusePlan, ratio: float, score: NDArray[Any]) -> Positions:
    """The ``ratio`` of approximate positions with the highest score."""
    positions, count = plan.approximate_positions, plan.budget(ratio)
    return np.sort(positions[np.argsort(-score, kind="stable")[:count]])


def recompute_cost(repair: TokenSelector, ratio: float, layers: int, projection_share: float) -> float:
    """What repairing costs, as a share of prefilling the same tokens: ``(d + q + r (L - d)) / L``."""
    if not repair.depth:
        return ratio
    return (repair.depth + projection_share + ratio * (layers - repair.depth)) / layers
