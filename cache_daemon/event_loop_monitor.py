"""Event loop monitor: measures stalls and logs the causes of long stalls."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import NamedTuple

import structlog
from kvsidecar.process.background_task import BackgroundTask

_STEP_SECONDS = 0.02
_WINDOW_SECONDS = 60.0
# Stalls longer than this are logged, at most one per interval.
_LOG_SECONDS, _LOG_INTERVAL_SECONDS = 0.25, 10.0
_MAX_FRAMES = 6

log = structlog.get_logger("cache_daemon")


class EventLoopMonitor:
    """Measures stalls of the running event loop while the ``with`` block runs.

    A separate thread samples the loop. For a long stall it logs the loop's stack (functions and lines, never values),
    the CPU time of the loop's thread, the time that the loop's thread waited for a processor, and the CPU time of the
    whole process. If other threads used CPU time, the loop waited for the interpreter lock. ``major_faults`` counts
    pages read from disk, including the program's own.
    """

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=4096)
        self._task = BackgroundTask(self._watch)
        self._beat = self._logged_at = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> EventLoopMonitor:
        self._beat = time.monotonic()
        self._task.start()
        self._thread = threading.Thread(
            target=self._sample,
            args=(threading.get_ident(), threading.get_native_id()),
            name="loop-monitor",
            daemon=True,
        )
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await self._task.stop()

    def max_stall_ms(self) -> float:
        """Return the longest stall of the last minute, in milliseconds."""
        since = time.monotonic() - _WINDOW_SECONDS
        return max((ms for at, ms in self._stalls if at >= since), default=0.0)

    async def _watch(self) -> None:
        while True:
            began = self._beat = time.monotonic()
            await asyncio.sleep(_STEP_SECONDS)
            late_ms = (time.monotonic() - began - _STEP_SECONDS) * 1e3
            if late_ms > 1.0:
                self._stalls.append((began, late_ms))

    def _sample(self, loop_thread: int, task: int) -> None:
        """Sample the loop; runs on its own thread."""
        beat, spent = self._beat, _Usage.of(loop_thread, task)
        while not self._ended.wait(_LOG_SECONDS / 2):
            late = time.monotonic() - self._beat
            if self._beat != beat:
                beat, spent = self._beat, _Usage.of(loop_thread, task)
            elif late > _LOG_SECONDS and time.monotonic() - self._logged_at > _LOG_INTERVAL_SECONDS:
                self._logged_at = time.monotonic()
                log.warning(
                    "event loop stalled",
                    ms=round(late * 1e3),
                    **spent.until(_Usage.of(loop_thread, task)),
                    at=_stack(loop_thread),
                )


class _Usage(NamedTuple):
    """CPU time of a thread and its process so far, in seconds."""

    computing: float
    waiting: float
    process: float
    major_faults: int

    @classmethod
    def of(cls, thread: int, task: int) -> _Usage:
        computing = time.clock_gettime(time.pthread_getcpuclockid(thread))
        return cls(
            computing, _run_queue_seconds(task), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        )

    def until(self, later: _Usage) -> dict[str, int]:
        """Return the difference to a later sample as log fields, times in milliseconds."""
        times = {f"{name}_ms": round((getattr(later, name) - getattr(self, name)) * 1e3) for name in self._fields[:-1]}
        return {**times, "major_faults": later.major_faults - self.major_faults}


def _run_queue_seconds(task: int) -> float:
    """Return the seconds that a runnable thread waited for a processor; 0 if unknown."""
    try:
        return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _stack(thread: int) -> list[str]:
    """Return the innermost calls of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame)[-_MAX_FRAMES:] if frame is not None else []
    return [f"{call.filename.rsplit('/', 2)[-1]}:{call.lineno} {call.name}" for call in reversed(calls)]
