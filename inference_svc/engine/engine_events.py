"""Engine events: messages of other threads to the engine's thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import LoadResult
from inference_svc.sequence.sequence import Sequence


@dataclass(frozen=True)
class RequestSubmitted:
    sequence: Sequence


@dataclass(frozen=True)
class CancelRequested:
    sequence: Sequence


@dataclass(frozen=True)
class LoadFinished:
    sequence: Sequence
    result: LoadResult


@dataclass(frozen=True)
class SaveFinished:
    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class PartialSaveFinished:
    """A partial save of a running sequence ended; ``stored`` is None if it failed."""

    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class PreemptionSaved:
    """The save of a preempted sequence ended; ``stored`` is None if it failed."""

    sequence: Sequence
    stored: StoredPrefix | None


@dataclass(frozen=True)
class ProbeFinished:
    sequence: Sequence
    tokens: int


@dataclass(frozen=True)
class EngineTask:
    """A function to run between two steps. ``run`` must not raise; ``fail`` is called if the engine has stopped."""

    run: Callable[[], None]
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
    """FIFO of events. Any thread posts events; the engine's thread drains them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[EngineEvent] = deque()
        self._submitted = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_pending_requests(self) -> int:
        """Number of submitted sequences that the engine has not handled yet."""
        return self._submitted

    def post(self, event: EngineEvent) -> bool:
        """Appends an event. False for a submission or task after ``close``."""
        with self._changed:
            if self._closed and isinstance(event, RequestSubmitted | EngineTask):
                return False
            self._submitted += isinstance(event, RequestSubmitted)
            self._events.append(event)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Ends ``wait``; ``post`` accepts no submissions or tasks any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, busy: Callable[[], bool], wake_at: float | None = None) -> bool:
        """Waits for an event, until ``busy()`` is true, or until ``wake_at`` (time.perf_counter).

        False after ``close``.
        """
        seconds = None if wake_at is None else max(0.0, wake_at - time.perf_counter())
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._events) or busy(), seconds)
            return not self._closed

    def drain(self, handle: Callable[[EngineEvent], None]) -> None:
        """Handles all queued events. A submission counts as pending until it is handled."""
        while self._events:
            event = self._events.popleft()
            handle(event)
            if isinstance(event, RequestSubmitted):
                with self._changed:
                    self._submitted -= 1
