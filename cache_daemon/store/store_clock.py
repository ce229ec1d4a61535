"""Clocks of a store: Unix time that never decreases."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf


class WallClock:
    """Unix time in seconds that never decreases while the process runs.

    It follows the system's clock forward: a daemon may start before NTP has set that.
    """

    def __init__(self) -> None:
        self._offset = -inf

    def __call__(self) -> float:
        running = time.monotonic()
        self._offset = max(self._offset, time.time() - running)
        return self._offset + running


class StoreClock:
    """A clock that is never below the times that the store has recorded before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._floor_offset = clock, -inf

    def __call__(self) -> float:
        return max(self._clock(), self._floor_offset + time.monotonic())

    def advance_to(self, seconds: float) -> None:
        """Continue from a recorded time on, if the clock is below it.

        Otherwise chunks would get times of use from 1970, and expire when the clock is right.
        """
        self._floor_offset = max(self._floor_offset, seconds - time.monotonic())
