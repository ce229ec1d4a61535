"""A circuit breaker: leaves a failing engine alone, and lets work through again carefully.

Closed, everything goes. After some failures in a row, or when half of the last calls failed, it opens: nothing goes
until somebody says that the engine answers. Then it is half open: as many calls go at a time as have to succeed, to all
others it is as if it were open; one failure opens it again, some successes close it. A call that was not answered in
time is a failure like any other.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum

_IN_A_ROW, _WINDOW, _SHARE, _TRUSTED_AFTER = 3, 20, 0.5, 3


class Circuit(Enum):
    """The states, as metrics tell them."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Begins open: nobody knows the engine yet. Not thread-safe."""

    def __init__(self) -> None:
        self.state = Circuit.OPEN
        self.why, self.since = "not connected yet", time.monotonic()
        self.opened = 0
        self._in_a_row = self._good = 0
        self._trials: set[object] = set()  # the calls that go while it is half open
        self._recent: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def allows(self) -> bool:
        return self.state is not Circuit.OPEN

    @property
    def tried(self) -> bool:
        """Whether it is half open, and as many calls go as may."""
        return self.state is Circuit.HALF_OPEN and len(self._trials) >= _TRUSTED_AFTER

    def enter(self) -> object | None:
        """Begins a call: what ``leave`` wants when it has ended, None when none may begin."""
        if not self.allows or self.tried:
            return None
        call = object()
        if self.state is Circuit.HALF_OPEN:
            self._trials.add(call)
        return call

    def leave(self, call: object) -> None:
        """Ends a call. One of before the circuit last opened makes no room."""
        self._trials.discard(call)

    def answered(self) -> None:
        """The engine was asked for trial, and answers."""
        if self.state is Circuit.OPEN:
            self.state, self._good, self._in_a_row = Circuit.HALF_OPEN, 0, 0
            self._trials.clear()
            self._recent.clear()

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._recent.append(True)
        if self.state is Circuit.HALF_OPEN:
            self._good += 1
            if self._good >= _TRUSTED_AFTER:
                self.state, self.why = Circuit.CLOSED, ""

    def failed(self, why: str) -> bool:
        """Returns whether the circuit opened by it. What an open one fails with now is why it stays open."""
        if self.state is Circuit.OPEN:
            self.why = why
            return False
        self._in_a_row, self._good = self._in_a_row + 1, 0
        self._recent.append(False)
        bad = self._recent.count(False)
        worn = len(self._recent) == _WINDOW and bad >= _SHARE * _WINDOW
        if not (self.state is Circuit.HALF_OPEN or self._in_a_row >= _IN_A_ROW or worn):
            return False
        if self.state is Circuit.CLOSED:
            self.since = time.monotonic()
        self.state, self.why = Circuit.OPEN, why
        self.opened += 1
        return True
