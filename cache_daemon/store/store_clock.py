"""Clocks of a store: Unix time that never decreases."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf


class WallClock:
    """Unix time in seconds that never decreases while the process runs.

    It follows jumps of the system clock forward, since a daemon may start before NTP has set the clock.
    """

    def __init__(self) -> None:
        self._offset = -inf

    def __call__(self) -> float:
        running = time.monotonic()
        self._offset = max(self._offset, time.time() - running)
        return self._offset + running


class StoreClock:
    """A clock that is never earlier than a time that the store has recorded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._floor_offset = clock, -inf

    def __call__(self) -> float:
        return max(self._clock(), self._floor_offset + time.monotonic())

    def advance_to(self, seconds: float) -> None:
        """Continue from a recorded time, if the clock is earlier.

        Otherwise, on a machine whose clock starts in 1970, chunks would get wrong times of use, and expire once the
        clock is right.
        """
        self._floor_offset = max(self._floor_offset, seconds - time.monotonic())
