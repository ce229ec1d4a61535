"""Step cost model: seconds of a step by its number of rows.

It is calibrated at the start and updated with every step. On a shared machine and with growing contexts, the costs of
all steps rise and fall together. So the model learns one common scale quickly, and the relative costs of different
numbers of rows slowly.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Cost of a further row relative to the first row, before calibration.
_SLOPE = 0.04
_SCALE_GAIN, _SHAPE_GAIN = 0.25, 0.04
# An interrupted step changes the model by no more than this factor.
_MAX_RATIO = 2.0
# Initial cost of a branch.
_BRANCH_SECONDS = 2e-4
# Calibration: rows of the timed steps, repeats of each, and the time after which no larger step is timed.
_TIMED_ROWS, _REPEATS, _MAX_TIMING_SECONDS = (1, 2, 4, 8, 16, 32, 64), 3, 2.0


def time_steps(run: Callable[[int], object], min_rows: int = 1) -> dict[int, float]:
    """Measures the seconds of ``run(rows)`` for several numbers of rows, from ``min_rows`` on.

    Takes the minimum of a few repeats, because other load on the machine is not a cost of the step. Measures at least
    two numbers of rows. For a large model it measures only two; the cost model extrapolates to other numbers, and
    learns their costs later.
    """
    found: dict[int, float] = {}
    began = time.perf_counter()
    for rows in _TIMED_ROWS[bisect_left(_TIMED_ROWS, min_rows) :]:
        run(rows)  # warm-up: chooses kernels and allocates memory
        found[rows] = min(time_once(run, rows) for _ in range(_REPEATS))
        if len(found) > 1 and time.perf_counter() - began > _MAX_TIMING_SECONDS:
            break
    return found


def time_once(run: Callable[[int], object], rows: int) -> float:
    """Measures the seconds of one ``run``."""
    began = time.perf_counter()
    run(rows)
    return time.perf_counter() - began


class StepCostModel:
    """Expected seconds of a step.

    If steps without draft tokens are ``recorded`` as CUDA graphs, they have a separate cost curve.
    """

    def __init__(self, recorded: bool) -> None:
        self._scale = math.nan
        shape = [1 + _SLOPE * (n - _ROWS[0]) for n in _ROWS]
        # Cost of a branch besides its rows: allocating blocks and copying into them.
        self.branch_seconds = _BRANCH_SECONDS
        self._shape = {True: shape, False: list(shape) if recorded else shape}

    def calibrate(self, drafted: Mapping[int, float], plain: float) -> None:
        """Sets the costs from measured seconds.

        ``drafted`` maps numbers of rows (at least two) to the seconds of a step with draft tokens. ``plain`` is the
        time of a step of one row without draft tokens.
        """
        measured = sorted(drafted.items())
        self._scale = measured[0][1]
        for i, n in enumerate(_ROWS):
            seconds = _interpolated([r for r, _ in measured], [s for _, s in measured], n)
            self._shape[True][i] = max(seconds / self._scale, 1e-3)
        if self._shape[False] is not self._shape[True]:
            self._shape[False] = [price * plain / self._scale for price in self._shape[True]]

    def seconds(self, rows: int, drafted: bool) -> float:
        """Expected seconds of a step. Before the first measurement, the unit is the time of a step of one row."""
        relative = _interpolated(_ROWS, self._shape[drafted], rows)
        return relative * (1.0 if math.isnan(self._scale) else self._scale)

    def learn_branches(self, branches: int, seconds: float) -> None:
        """Records the time to allocate the blocks of branches."""
        each = min(seconds / branches, _MAX_RATIO * self.branch_seconds)
        self.branch_seconds += _SHAPE_GAIN * (each - self.branch_seconds)

    def learn(self, rows: int, drafted: bool, seconds: float) -> None:
        """Records the time of a step."""
        expected = self.seconds(rows, drafted)
        if math.isnan(self._scale):
            self._scale = seconds / expected
            return
        ratio = min(max(seconds / expected, 1 / _MAX_RATIO), _MAX_RATIO)
        self._scale *= ratio**_SCALE_GAIN
        nearest = min(range(len(_ROWS)), key=lambda i: abs(_ROWS[i] - rows))
        self._shape[drafted][nearest] *= ratio**_SHAPE_GAIN


def _interpolated(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Interpolates and extrapolates linearly; an extrapolation is at least the first value."""
    i = min(max(bisect_left(places, at), 1), len(places) - 1)
    a, x = places[i - 1], values[i - 1]
    found = x + (values[i] - x) * (at - a) / (places[i] - a)
    return max(found, values[0]) if at > places[-1] else found
