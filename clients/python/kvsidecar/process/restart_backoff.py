"""Restart backoff: growing pauses before restarts of a process that keeps dying."""

from __future__ import annotations


class RestartBackoff:
    """Pause before the next restart, in seconds.

    The pause starts at ``least`` seconds and doubles with each restart, up to ``most``. After the process has run for
    ``stable`` seconds, the pause is ``least`` seconds again.
    """

    def __init__(self, least: float, most: float, stable: float, *, immediate: bool = False) -> None:
        """Start at ``least``; with ``immediate``, the first restart has no pause."""
        self._least, self._most, self._stable = least, most, stable
        self._first = self._next = 0.0 if immediate else least

    def pause(self, ran_seconds: float) -> float:
        """Return the pause before restarting a process that ran for ``ran_seconds``."""
        pause = self._first if ran_seconds > self._stable else self._next
        self._next = min(self._most, max(self._least, pause * 2))
        return pause
