"""Token selector: the interface, its input signals, and the cost of recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan

# Attention is measured for at most this many last tokens of the question.
_QUESTION_TOKENS = 64


@dataclass(frozen=True)
class SelectionSignals:
    """Measurements of the approximate tokens, in the order of their positions.

    Each array has the shape ``[approximate tokens]``.

    ``deviation``: distance between a token's computed and stored keys and values in layers 1 to the selector's depth.
    It is the root of the sum of squared differences, where each layer's keys and values are first divided by their
    root mean square norm.
    ``attention``: attention of the question to a token. Each head of each layer contributes the square of the largest
    weight that any token of the question gives the token; the contributions are added.
    """

    deviation: NDArray[Any] | None = None
    attention: NDArray[Any] | None = None


class TokenSelector(Protocol):
    """Selects the approximate tokens to recompute.

    ``depth``: number of layers that are computed for all approximate tokens before the selection; 0 without
    measurements. ``needs_deviation``: ``select`` needs the signal ``deviation``. ``attention_depth``: share of layers
    in which the question is computed over the stored keys, to measure attention; 0 if attention is not needed.
    """

    name: str
    depth: int
    needs_deviation: bool
    attention_depth: float

    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        """Return ascending positions: about the share ``ratio`` of the approximate ones, all of them for 1."""
        ...


def top_positions(plan: ReusePlan, ratio: float, score: NDArray[Any]) -> Positions:
    """Return the share ``ratio`` of approximate positions with the highest scores."""
    positions, count = plan.approximate_positions, plan.budget(ratio)
    return np.sort(positions[np.argsort(-score, kind="stable")[:count]])


def question_rows(repair: TokenSelector, uncached: int) -> int:
    """Number of last tokens of a question of ``uncached`` tokens whose attention the selector needs."""
    return min(uncached, _QUESTION_TOKENS) if repair.attention_depth else 0


def recompute_cost(
    repair: TokenSelector, ratio: float, layers: int, projection_share: float, question_share: float = 0.0
) -> float:
    """Cost of recomputation as a share of a prefill of the relocated tokens.

    It is ``(d + q + r (L - d)) / L + a s``, with depth d, projection share q, ratio r, L layers, attention depth a and
    question share s: the question's rows (``question_rows``) divided by the number of relocated tokens. Without depth,
    it is ``r``.
    """
    if not repair.depth:
        return ratio
    measured_and_recomputed = (repair.depth + projection_share + ratio * (layers - repair.depth)) / layers
    return measured_and_recomputed + repair.attention_depth * question_share
