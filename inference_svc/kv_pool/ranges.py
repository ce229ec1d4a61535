"""Runs of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def runs_of(rising: Iterable[int]) -> list[range]:
    """Rising numbers as ranges, as few as there can be."""
    found = (list(run) for _, run in groupby(enumerate(rising), lambda one: one[1] - one[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in found]
