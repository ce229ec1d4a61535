"""Priority executor: one thread that runs urgent jobs first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvsidecar.process.thread_pool import started_pool

from inference_svc.sequence.sequence import Sequence

_POLL_SECONDS = 0.005


@dataclass(eq=False)
class Job:
    """Work for a sequence. ``work`` must not raise; ``finished`` is set after it returned."""

    sequence: Sequence
    work: Callable[[Job], None]
    urgent: bool = False
    finished: threading.Event = field(default_factory=threading.Event)


class PriorityExecutor:
    """One thread with a queue of jobs. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name`` is the thread's name."""
        self._thread = started_pool(1, name)
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._current: Job | None = None

    @property
    def jobs(self) -> list[Job]:
        """Unfinished jobs, in order of submission."""
        with self._changed:
            return [*([self._current] if self._current else []), *self._waiting]

    def submit(self, sequence: Sequence, work: Callable[[Job], None]) -> Job:
        """Queue work. Raises RuntimeError after ``shutdown``."""
        job = Job(sequence, work)
        with self._changed:
            self._thread.submit(self._run_next)
            self._waiting.append(job)
        return job

    def prioritize(self, jobs: Iterable[Job]) -> None:
        """Mark jobs as urgent: they run before other jobs."""
        with self._changed:
            for job in jobs:
                job.urgent = True

    def wait_idle(self, seconds: float, unless: Callable[[], bool]) -> None:
        """Wait until all jobs are finished, ``unless()`` is true, or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (self._current or self._waiting) and not unless() and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)

    def shutdown(self) -> None:
        """Finish the queued jobs and end the thread. Blocks."""
        self._thread.shutdown()

    def _run_next(self) -> None:
        with self._changed:
            job = next((job for job in self._waiting if job.urgent), self._waiting[0])
            self._waiting.remove(job)
            self._current = job
        try:
            job.work(job)
        finally:
            with self._changed:
                self._current = None
                self._changed.notify_all()
            job.finished.set()
