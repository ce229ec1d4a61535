"""Interface of token selectors, and their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan


@dataclass(frozen=True)
class SelectionSignals:
    """Measurements of the approximate tokens, each ``[approximate tokens]`` in the order of their positions.

    ``deviation``: distance of keys and values of layers 1 to the selector's depth from the stored ones: the root of the
    sum of squares, each layer's keys and values relative to their mean norm.
    ``attention``: attention of the question to a token: over heads and layers, the sum of squares of the largest weight
    that any token of the question gives it.
    """

    deviation: NDArray[Any] | None = None
    attention: NDArray[Any] | None = None


class TokenSelector(Protocol):
    """Selects the approximate tokens to recompute.

    ``depth`` layers are computed for all approximate tokens before the selection; 0 if nothing need be measured.
    ``needs_deviation`` requests that signal. ``attention_depth`` is the share of layers through which the question is
    read over the stored keys to measure attention; 0 if attention need not be measured.
    """

    name: str
    depth: int
    needs_deviation: bool
    attention_depth: float

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        """Return rising positions, about ``ratio`` of the approximate ones; all of them for 1."""
        ...


def top_positions(plan: ReusePlan, ratio: float, score: NDArray[Any]) -> Positions:
    """Return the ``ratio`` of approximate positions with the highest score."""
    positions, count = plan.approximate_positions, plan.budget(ratio)
    return np.sort(positions[np.argsort(-score, kind="stable")[:count]])


def recompute_cost(repair: TokenSelector, ratio: float, layers: int, projection_share: float) -> float:
    """Cost of recomputation as a share of a prefill of the same tokens: ``(d + q + r (L - d)) / L``."""
    if not repair.depth:
        return ratio
    return (repair.depth + projection_share + ratio * (layers - repair.depth)) / layers
