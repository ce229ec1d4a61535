"""How long the event loop was kept from its work: what every caller waits for at worst, and by what."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import NamedTuple

import structlog

_STEP_SECONDS = 0.02
_WINDOW_SECONDS = 60.0
# From here on a stall is worth a line in the log, at most one in so many seconds.
_TOLD_SECONDS, _TOLD_EVERY_SECONDS = 0.25, 10.0
_DEPTH = 6

log = structlog.get_logger("cache_daemon")


class StallWatch:
    """Watches the running loop while its block lasts.

    A thread looks at the loop now and then. What it sees the loop do during a long stall is logged: functions and
    lines, never values; and how much of the stall the loop's thread was computing, how much of it it waited for a
    processor of the machine, and what the whole process computed meanwhile: when that is others' work, the loop waits
    for the interpreter. ``major_faults`` are pages that came from disk, the program's own among them.
    """

    def __init__(self) -> None:
        self._stalls: deque[tuple[float, float]] = deque(maxlen=4096)
        self._task: asyncio.Task[None] | None = None
        self._beat = self._told_at = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> StallWatch:
        self._beat = time.monotonic()
        self._task = asyncio.create_task(self._watch())
        self._thread = threading.Thread(
            target=self._look, args=(threading.get_ident(), threading.get_native_id()), name="stalls", daemon=True
        )
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._ended.set()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def worst_ms(self) -> float:
        """The longest stall of the last minute, in milliseconds."""
        since = time.monotonic() - _WINDOW_SECONDS
        return max((ms for at, ms in self._stalls if at >= since), default=0.0)

    async def _watch(self) -> None:
        while True:
            began = self._beat = time.monotonic()
            await asyncio.sleep(_STEP_SECONDS)
            late_ms = (time.monotonic() - began - _STEP_SECONDS) * 1e3
            if late_ms > 1.0:
                self._stalls.append((began, late_ms))

    def _look(self, loop_thread: int, task: int) -> None:
        """On a thread of its own."""
        beat, spent = self._beat, _Spent.of(loop_thread, task)
        while not self._ended.wait(_TOLD_SECONDS / 2):
            late = time.monotonic() - self._beat
            if self._beat != beat:
                beat, spent = self._beat, _Spent.of(loop_thread, task)
            elif late > _TOLD_SECONDS and time.monotonic() - self._told_at > _TOLD_EVERY_SECONDS:
                self._told_at = time.monotonic()
                log.warning(
                    "the event loop stands still",
                    ms=round(late * 1e3),
                    **spent.until(_Spent.of(loop_thread, task)),
                    at=_stack(loop_thread),
                )


class _Spent(NamedTuple):
    """Of a thread and its process so far; times in seconds."""

    computing: float
    waiting: float
    process: float
    major_faults: int

    @classmethod
    def of(cls, thread: int, task: int) -> _Spent:
        computing = time.clock_gettime(time.pthread_getcpuclockid(thread))
        return cls(computing, _waited(task), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt)

    def until(self, later: _Spent) -> dict[str, int]:
        """What was spent from here on, times in milliseconds, for the log."""
        times = {f"{name}_ms": round((getattr(later, name) - getattr(self, name)) * 1e3) for name in self._fields[:-1]}
        return {**times, "major_faults": later.major_faults - self.major_faults}


def _waited(task: int) -> float:
    """Seconds that a thread was ready to run and had no processor; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _stack(thread: int) -> list[str]:
    """The innermost calls of a thread, innermost first."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame)[-_DEPTH:] if frame is not None else []
    return [f"{call.filename.rsplit('/', 2)[-1]}:{call.lineno} {call.name}" for call in reversed(calls)]
