"""What other threads tell the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inference_svc.engine.kv_connector import LoadResult
from inference_svc.engine.sequence import Sequence, StoredPrefix


@dataclass(frozen=True)
class RequestSubmitted:
    sequence: Sequence


@dataclass(frozen=True)
class CancelRequested:
    sequence: Sequence


@dataclass(frozen=True)
class LoadFinished:
    sequence: Sequence
    restored: LoadResult


@dataclass(frozen=True)
class SaveFinished:
    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class PartialSaveFinished:
    """Of a sequence that goes on."""

    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class PreemptionSaved:
    """What a preempted sequence computed is stored, or could not be."""

    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class ProbeFinished:
    sequence: Sequence
    tokens: int


@dataclass(frozen=True)
class EngineTask:
    """Something to be done between two steps, which raises nothing; ``fail`` where no step will come."""

    work: Callable[[], None]
    fail: Callable[[Exception], None]


EngineEvent = (
    RequestSubmitted
    | CancelRequested
    | LoadFinished
    | SaveFinished
    | PartialSaveFinished
    | PreemptionSaved
    | ProbeFinished
    | EngineTask
)


class EventQueue:
    """Letters in the order in which they came. Any thread writes, one reads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._letters: deque[EngineEvent] = deque()
        self._submitted = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def submitted(self) -> int:
        """Sequences in letters that are not read yet."""
        return self._submitted

    def post(self, letter: EngineEvent) -> bool:
        """False when the box is closed to new sequences and to work, and this is one."""
        with self._changed:
            if self._closed and isinstance(letter, RequestSubmitted | EngineTask):
                return False
            self._submitted += isinstance(letter, RequestSubmitted)
            self._letters.append(letter)
            self._changed.notify()
            return True

    def close(self) -> None:
        """The reader is to end; no sequence is taken any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, busy: Callable[[], bool], wake_at: float | None = None) -> bool:
        """Returns when there is a letter, or ``busy()``, or at ``wake_at`` (time.perf_counter); False when the box was
        closed."""
        seconds = None if wake_at is None else max(0.0, wake_at - time.perf_counter())
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._letters) or busy(), seconds)
            return not self._closed

    def take(self, read: Callable[[EngineEvent], None]) -> None:
        """Reads all letters that are there. A sequence is counted until it was read, so that it is never in no
        place."""
        while self._letters:
            letter = self._letters.popleft()
            read(letter)
            if isinstance(letter, RequestSubmitted):
                with self._changed:
                    self._submitted -= 1
