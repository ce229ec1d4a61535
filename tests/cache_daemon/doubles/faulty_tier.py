"""A durable tier that fails, delays and loses on command, in front of another one. For tests."""

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
    """A ``DurableTier``. Commands may be given from any thread and hold for the calls that begin after them."""

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
        """The next applies raise ``error``, or TierFailed."""
        self._apply_errors.extend([error or TierFailed("the disk was told to fail")] * count)

    def heal(self) -> None:
        """No further apply fails."""
        self._apply_errors.clear()

    def fill_up(self, count: int) -> None:
        """The next applies raise OutOfSpace."""
        self.fail_applies(count, OutOfSpace("the disk was told to be full"))

    def fault_reads(self, count: int, result: ReadResult) -> None:
        """The next reads of one payload end so, and leave rubbish in the target."""
        self._read_faults.extend([result] * count)

    def hold(self) -> None:
        """Calls wait until ``let_go``."""
        self._arrived.clear()
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def wait_until_held(self, timeout: float = 60.0) -> bool:
        """Whether a call has come to the closed gate in time."""
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
