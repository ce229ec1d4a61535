"""Prefill budget: maximum prompt rows of a step in which other sequences decode."""

from __future__ import annotations

from collections.abc import Iterable

from inference_svc.model_runner.forward_batch import SequenceSlice

# _MAX_RATIO: a step counts as at most this multiple of the running mean, because a longer step was interrupted. _GAIN:
# weight of a new step in the running mean.
_MAX_RATIO, _GAIN = 2.0, 0.25
# Steps with fewer prompt rows do not update the cost of a row.
_MIN_MEASURED_ROWS = 16
# _MIN_ROWS: minimum prompt rows per step, at any cost, so that prompts always progress. The budget is a multiple of
# _ROW_STEP.
_MIN_ROWS, _ROW_STEP = 32, 16
# A step with prompt rows may take this multiple of a decode-only step, even if that exceeds the time budget.
_MAX_STRETCH = 2.0


class PrefillBudget:
    """Cost model of a step: a fixed cost and a cost per prompt row.

    Both are measured at the start and updated with every step. ``budget_seconds`` limits the time of a step with both
    decoding sequences and prompts; 0 for no limit. Only the engine's thread changes the model.
    """

    def __init__(self, budget_seconds: float) -> None:
        self._budget = budget_seconds
        self._fixed: float | None = None
        self._row: float | None = None

    def learn(self, prompt_rows: int, seconds: float) -> None:
        """Records the seconds of a step with ``prompt_rows`` prompt rows."""
        if not prompt_rows:
            self._fixed = _mean(self._fixed, seconds)
        elif prompt_rows >= _MIN_MEASURED_ROWS:
            # The fixed cost may have been measured on a busier machine: count at least half of the time for the rows.
            each = max(seconds - (self._fixed or 0.0), seconds / 2) / prompt_rows
            self._row = _mean(self._row, each)

    def learn_step(self, spans: Iterable[SequenceSlice], seconds: float) -> None:
        """Records the seconds of a step by its slices. Ignores steps that may have waited for layers to load."""
        spans = list(spans)
        if all(span.gate is None for span in spans):
            self.learn(sum(len(span.tokens) for span in spans if len(span.tokens) > 1 + span.num_drafted), seconds)

    def seconds(self, rows: int) -> float | None:
        """Expected seconds of a step with ``rows`` prompt rows; None while unknown."""
        return None if self._row is None else (self._fixed or 0.0) + self._row * rows

    @property
    def max_rows(self) -> int | None:
        """Maximum prompt rows of a step in which other sequences decode; None for no limit."""
        if not self._budget or self._row is None or self._fixed is None:
            return None
        allowed = max(self._budget, _MAX_STRETCH * self._fixed)
        rows = (allowed - self._fixed) / max(self._row, 1e-9)
        return max(_MIN_ROWS, int(rows) // _ROW_STEP * _ROW_STEP)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _GAIN * (min(new, _MAX_RATIO * old) - old)
