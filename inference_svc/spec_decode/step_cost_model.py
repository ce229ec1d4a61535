"""What a pass costs by its number of rows: measured at the start, and with every pass.

Machines are shared and contexts grow, so all costs rise and fall together: what is learnt quickly is a common scale,
and only slowly how the costs of different numbers of rows compare.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# A row's cost as a share of the first one's, until it is measured.
_SLOPE = 0.04
_SCALE_GAIN, _SHAPE_GAIN = 0.25, 0.04
# One pass that was interrupted teaches no more than this.
_MOST_RATIO = 2.0
# Of a branch, until some were made.
_BRANCH_SECONDS = 2e-4


class StepCostModel:
    """Seconds of a pass. Where passes without guesses are recorded (CUDA graphs), they have prices of their own."""

    def __init__(self, recorded: bool) -> None:
        self._scale = math.nan
        shape = [1 + _SLOPE * (n - _ROWS[0]) for n in _ROWS]
        # What a branch more takes beside its rows: its pages, and what is copied there.
        self.branch_seconds = _BRANCH_SECONDS
        self._shape = {True: shape, False: list(shape) if recorded else shape}

    def calibrate(self, drafted: Mapping[int, float], plain: float) -> None:
        """Sets seconds of passes with so many rows, at least two of them; ``plain`` is one row's without guesses."""
        measured = sorted(drafted.items())
        self._scale = measured[0][1]
        for i, n in enumerate(_ROWS):
            seconds = _interpolated([r for r, _ in measured], [s for _, s in measured], n)
            self._shape[True][i] = max(seconds / self._scale, 1e-3)
        if self._shape[False] is not self._shape[True]:
            self._shape[False] = [price * plain / self._scale for price in self._shape[True]]

    def seconds(self, rows: int, drafted: bool) -> float:
        """Of a pass over so many rows; relative to a pass over few until one was measured."""
        relative = _interpolated(_ROWS, self._shape[drafted], rows)
        return relative * (1.0 if math.isnan(self._scale) else self._scale)

    def learn_branches(self, branches: int, seconds: float) -> None:
        """So many branches got their pages in so long."""
        each = min(seconds / branches, _MOST_RATIO * self.branch_seconds)
        self.branch_seconds += _SHAPE_GAIN * (each - self.branch_seconds)

    def learn(self, rows: int, drafted: bool, seconds: float) -> None:
        """A pass took so long."""
        expected = self.seconds(rows, drafted)
        if math.isnan(self._scale):
            self._scale = seconds / expected
            return
        ratio = min(max(seconds / expected, 1 / _MOST_RATIO), _MOST_RATIO)
        self._scale *= ratio**_SCALE_GAIN
        nearest = min(range(len(_ROWS)), key=lambda i: abs(_ROWS[i] - rows))
        self._shape[drafted][nearest] *= ratio**_SHAPE_GAIN


def _interpolated(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """On the line between the two places around, or beyond the ends; nothing is cheaper than the first."""
    i = min(max(bisect_left(places, at), 1), len(places) - 1)
    a, x = places[i - 1], values[i - 1]
    found = x + (values[i] - x) * (at - a) / (places[i] - a)
    return max(found, values[0]) if at > places[-1] else found
