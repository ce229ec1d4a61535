"""What a byte in a tier saves: seconds of prefill."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median_low

from cache_daemon.eviction.eviction_policy import Entry

# No model computes a token slower: whoever claims more is not believed.
_MAX_TOKEN_SECONDS = 10.0
# A claim counts at most so many times the median of the entries that came last: of an entry that nobody has used
# yet less, since with more it would stay whatever comes after it.
_MAX_RATIO_UNUSED, _MAX_RATIO_USED = 1.0, 8.0
_WINDOW = 256
_MEDIAN_EVERY = 32


class PrefillCost:
    """Seconds of prefill that an entry saves per byte.

    Where they are unknown they are taken from the tokens and the mean of the entries seen; if all are unknown, a token
    counts one second. A writer's claim is bounded by what others claim, or one writer could keep a tier for ever.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._seen: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0
        self.median = 0.0  # of what the last entries are worth; 0 while there are few

    def cost_per_byte(self, entry: Entry) -> float:
        """Returns what an entry is worth, above 0. Learns from the entry."""
        found = self._claimed(entry) / max(entry.size_bytes, 1)
        self._seen.append(found)
        self._since += 1
        if self._since >= _MEDIAN_EVERY:
            self._since, self.median = 0, median_low(self._seen)
        return found

    def clamp(self, cost_per_byte: float, used: bool) -> float:
        """Returns a worth within what the last entries allow."""
        return (
            min(cost_per_byte, self.median * (_MAX_RATIO_USED if used else _MAX_RATIO_UNUSED))
            if self.median
            else cost_per_byte
        )

    def _claimed(self, entry: Entry) -> float:
        seconds, most = entry.prefill_seconds, entry.tokens * _MAX_TOKEN_SECONDS
        if isfinite(seconds) and seconds > 0:
            seconds = min(seconds, most)
            self._seconds += seconds
            self._tokens += entry.tokens
        else:
            seconds = entry.tokens * (self._seconds / self._tokens if self._tokens else 1.0)
        return max(seconds, 1e-9)
