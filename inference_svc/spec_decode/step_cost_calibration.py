"""What passes cost on this machine, before the first request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 3
# A large model is timed by fewer rows: what is missing is drawn out, and learnt later.
_SECONDS = 2.0


def time_steps(run: Callable[[int], None], least: int = 1) -> dict[int, float]:
    """Seconds of ``run`` by its number of rows, ``least`` or more, the least of a few times: what else the machine does
    is no cost. Two numbers of rows at least."""
    found: dict[int, float] = {}
    began = time.perf_counter()
    for rows in _ROWS[bisect_left(_ROWS, least) :]:
        run(rows)  # kernels are chosen, and memory is had
        found[rows] = min(time_once(run, rows) for _ in range(_REPEATS))
        if len(found) > 1 and time.perf_counter() - began > _SECONDS:
            break
    return found


def time_once(run: Callable[[int], None], rows: int) -> float:
    """Seconds of ``run`` with so many rows, this time."""
    began = time.perf_counter()
    run(rows)
    return time.perf_counter() - began
