"""Reuse plan: the exact, relocated and uncached tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class RelocatedSpan:
    """Relocated tokens ``start`` to ``end`` of a prompt.

    Their keys and values were computed behind another prefix.
    """

    start: int
    end: int

    @property
    def positions(self) -> Positions:
        return np.arange(self.start, self.end)


@dataclass(frozen=True)
class ReusePlan:
    """Reuse of a prompt of ``tokens`` tokens.

    The first ``exact`` tokens have the keys and values of a prefill. The ``approximate`` spans, which are in order and
    disjoint, are relocated. All other tokens are uncached; the last token is always uncached.
    """

    tokens: int
    exact: int
    approximate: tuple[RelocatedSpan, ...] = ()

    def __post_init__(self) -> None:
        at = self.exact
        for stretch in self.approximate:
            if not at <= stretch.start < stretch.end < self.tokens:
                raise ValueError(f"{stretch} does not follow token {at} within {self.tokens} tokens")
            at = stretch.end

    @property
    def approximate_positions(self) -> Positions:
        parts = [s.positions for s in self.approximate]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def uncached_positions(self) -> Positions:
        known = np.zeros(self.tokens, bool)
        known[: self.exact] = True
        known[self.approximate_positions] = True
        return np.flatnonzero(~known)

    def budget(self, ratio: float) -> int:
        """Number of approximate tokens that make up the share ``ratio``."""
        return round(ratio * len(self.approximate_positions))
