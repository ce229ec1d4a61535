"""Circuit breaker: stops calls to a failing backend and resumes them carefully.

A closed circuit admits all calls. It opens after some failures in a row, or when half of the latest calls failed; an
open circuit admits no calls. When a probe of the backend succeeds, the circuit is half open: it admits a few trial
calls at a time and refuses all others. It closes when the number of successful trial calls reaches that limit; one
failure opens it again. A timeout counts as a failure.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum

_IN_A_ROW, _WINDOW, _SHARE, _TRUSTED_AFTER = 3, 20, 0.5, 3


class CircuitState(Enum):
    """States of a circuit breaker, as metrics show them."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """Circuit breaker of one backend. Not thread-safe.

    It starts open, because the state of the backend is unknown.
    """

    def __init__(self) -> None:
        self.state = CircuitState.OPEN
        self.reason, self.failing_since = "not connected yet", time.monotonic()
        self.num_opened = 0
        self._in_a_row = self._good = 0
        self._trials: set[object] = set()  # calls in flight while it is half open
        self._recent: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def allows_calls(self) -> bool:
        return self.state is not CircuitState.OPEN

    @property
    def trials_full(self) -> bool:
        """Return True while the circuit is half open with all trial calls in flight."""
        return self.state is CircuitState.HALF_OPEN and len(self._trials) >= _TRUSTED_AFTER

    def begin_call(self) -> object | None:
        """Begin a call. Returns a token for ``end_call``, or None when the call is refused."""
        if not self.allows_calls or self.trials_full:
            return None
        call = object()
        if self.state is CircuitState.HALF_OPEN:
            self._trials.add(call)
        return call

    def end_call(self, call: object) -> None:
        """End a call. A call that began before the circuit last opened frees no trial."""
        self._trials.discard(call)

    def half_open(self) -> None:
        """Change to half open: a probe succeeded, or none can be sent."""
        if self.state is CircuitState.OPEN:
            self.state, self._good, self._in_a_row = CircuitState.HALF_OPEN, 0, 0
            self._trials.clear()
            self._recent.clear()

    def record_success(self) -> None:
        self._in_a_row = 0
        self._recent.append(True)
        if self.state is CircuitState.HALF_OPEN:
            self._good += 1
            if self._good >= _TRUSTED_AFTER:
                self.state, self.reason = CircuitState.CLOSED, ""

    def record_failure(self, why: str) -> bool:
        """Record a failed call. Returns True if the circuit opened; while open, updates only the reason."""
        if self.state is CircuitState.OPEN:
            self.reason = why
            return False
        self._in_a_row, self._good = self._in_a_row + 1, 0
        self._recent.append(False)
        bad = self._recent.count(False)
        worn = len(self._recent) == _WINDOW and bad >= _SHARE * _WINDOW
        if not (self.state is CircuitState.HALF_OPEN or self._in_a_row >= _IN_A_ROW or worn):
            return False
        if self.state is CircuitState.CLOSED:
            self.failing_since = time.monotonic()
        self.state, self.reason = CircuitState.OPEN, why
        self.num_opened += 1
        return True
