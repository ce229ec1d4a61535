"""Cores that nobody computes on, for work that can as well be left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Shorter spans are too few of the kernel's ticks to tell, longer ones tell of another time.
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS = 0.05, 1.0
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE, _WAITING = 4, 5  # fields of proc_stat(5): idle, and idle while the disk works


@dataclass(frozen=True)
class CpuSample:
    """Seconds: by the clock, that all cores were idle, and that this process computed."""

    at: float
    idle: float
    own: float


def now() -> CpuSample:
    """Raises OSError, IndexError or ValueError where the kernel does not say."""
    fields = _STAT.read_text().split("\n", 1)[0].split()
    return CpuSample(time.monotonic(), (int(fields[_IDLE]) + int(fields[_WAITING])) / _TICKS, time.process_time())


class IdleCoreCounter:
    """Told from what was idle a moment ago. For one thread."""

    def __init__(self, look: Callable[[], CpuSample] = now, wait: Callable[[float], None] = time.sleep) -> None:
        self._look, self._wait = look, wait
        self._last: CpuSample | None = None
        self._spare = 0.0

    def count(self) -> float:
        """How many cores are idle, or this process's own; all of them where the kernel does not say. Takes up to 50 ms
        when nobody asked within a second."""
        try:
            return self._count()
        except (OSError, IndexError, ValueError):
            return float(os.cpu_count() or 1)

    def _count(self) -> float:
        last, current = self._last, self._look()
        if last is None or current.at - last.at > _MAX_INTERVAL_SECONDS:
            self._wait(_MIN_INTERVAL_SECONDS)
            last, current = current, self._look()
        elif current.at - last.at < _MIN_INTERVAL_SECONDS:
            return self._spare
        self._last = current
        self._spare = (current.idle - last.idle + current.own - last.own) / (current.at - last.at)
        return self._spare
