"""Prefill budget: prompt rows per step while other sequences decode, by measured time."""

from __future__ import annotations

from collections.abc import Iterable

from inference_svc.model_runner.forward_batch import SequenceSlice

# One step that was interrupted teaches no more than this.
_MAX_RATIO, _GAIN = 2.0, 0.25
# Steps with fewer rows of prompts say nothing about a row.
_MIN_MEASURED_ROWS = 16
# Prompts get so many rows whatever they take: the answers that decode beside them end, too.
_MIN_ROWS, _ROW_STEP = 32, 16
# Where a step without prompts takes long by itself, prompts may make it longer by this factor.
_MAX_STRETCH = 2.0


class PrefillBudget:
    """Cost model of a step: a fixed part, and a part per prompt row.

    Measured at the start and with every step. ``budget_seconds`` limits a step in which some sequences decode and
    others are read; 0 for no limit. Only the engine's thread changes it.
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
            # The fixed part may have been measured in a slower moment; a row is never free.
            each = max(seconds - (self._fixed or 0.0), seconds / 2) / prompt_rows
            self._row = _mean(self._row, each)

    def learn_step(self, spans: Iterable[SequenceSlice], seconds: float) -> None:
        """Records the seconds of a step by its slices, unless it waited for a layer."""
        spans = list(spans)
        if all(span.gate is None for span in spans):
            self.learn(sum(len(span.tokens) for span in spans if len(span.tokens) > 1 + span.num_drafted), seconds)

    def seconds(self, rows: int) -> float | None:
        """Expected seconds of a step with prompt rows; None while unknown."""
        return None if self._row is None else (self._fixed or 0.0) + self._row * rows

    @property
    def max_rows(self) -> int | None:
        """Prompt rows of a step in which others decode; None for no limit."""
        if not self._budget or self._row is None or self._fixed is None:
            return None
        allowed = max(self._budget, _MAX_STRETCH * self._fixed)
        rows = (allowed - self._fixed) / max(self._row, 1e-9)
        return max(_MIN_ROWS, int(rows) // _ROW_STEP * _ROW_STEP)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _GAIN * (min(new, _MAX_RATIO * old) - old)
