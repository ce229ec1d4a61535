"""Durable tier that wraps another tier, and fails or delays calls on command."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from cache_daemon.durable.durable_tier import (
    DurableTier,
    Loaded,
    LoadReport,
    OutOfSpace,
    PutResult,
    ReadJob,
    ReadResult,
    TierFailed,
    Usage,
    WriteGroup,
)


class FaultyTier:
    """A ``DurableTier`` with faults. Any thread may give commands; they affect calls that begin later."""

    def __init__(self, inner: DurableTier) -> None:
        self.inner = inner
        self.groups: list[WriteGroup] = []
        """The groups that were applied, in order. Their payloads may no longer be readable."""
        self.slow_seconds = 0.0
        self._apply_errors: deque[Exception] = deque()
        self._read_faults: deque[ReadResult] = deque()
        self._gate = threading.Event()
        self._gate.set()
        self._arrived = threading.Event()

    def fail_applies(self, count: int, error: Exception | None = None) -> None:
        """Let the next ``count`` applies raise ``error``, or TierFailed without one."""
        self._apply_errors.extend([error or TierFailed("the disk was told to fail")] * count)

    def heal(self) -> None:
        """Let all further applies succeed."""
        self._apply_errors.clear()

    def fill_up(self, count: int) -> None:
        """Let the next ``count`` applies raise OutOfSpace."""
        self.fail_applies(count, OutOfSpace("the disk was told to be full"))

    def fault_reads(self, count: int, result: ReadResult) -> None:
        """Let the next ``count`` payload reads return ``result``, and leave garbage in the target."""
        self._read_faults.extend([result] * count)

    def hold(self) -> None:
        """Let calls wait until ``let_go``."""
        self._arrived.clear()
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def wait_until_held(self, timeout: float = 60.0) -> bool:
        """Wait until a call waits for ``let_go``; return False after ``timeout`` seconds."""
        return self._arrived.wait(timeout)

    def _delay(self) -> None:
        if not self._gate.is_set():
            self._arrived.set()
            self._gate.wait()
        if self.slow_seconds:
            time.sleep(self.slow_seconds)

    def load(self) -> Iterable[Loaded]:
        return self.inner.load()

    @property
    def load_report(self) -> LoadReport:
        return self.inner.load_report

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        self._delay()
        return [self._read(job) for job in jobs]

    def _read(self, job: ReadJob) -> ReadResult:
        if not self._read_faults:
            return self.inner.read([job])[0]
        result = self._read_faults.popleft()
        if result is not ReadResult.OK:
            job.target[:] = b"\xa5" * len(job.target)
            return result
        return self.inner.read([job])[0]

    def apply(self, group: WriteGroup) -> list[PutResult]:
        self._delay()
        if self._apply_errors:
            raise self._apply_errors.popleft()
        done = self.inner.apply(group)
        self.groups.append(group)
        return done

    def notes(self) -> dict[bytes, bytes]:
        return self.inner.notes()

    def usage(self) -> Usage:
        return self.inner.usage()

    def compact(self) -> None:
        self._delay()
        self.inner.compact()

    def close(self) -> None:
        self.inner.close()
