"""Prefill cost: the seconds of prefill that a byte in a tier saves."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median_low

from cache_daemon.eviction.eviction_policy import Entry

# Upper bound of a credible prefill time per token: no model takes longer.
MAX_TOKEN_SECONDS = 10.0
# Upper bounds of an entry's cost, as multiples of the median of the latest entries. The bound for unused entries is
# lower; otherwise an entry with too high a prefill time would never be evicted.
_MAX_RATIO_UNUSED, _MAX_RATIO_USED = 1.0, 8.0
_WINDOW = 256
_MEDIAN_EVERY = 32


class PrefillCost:
    """Seconds of prefill per byte of an entry.

    An unknown time is estimated from the number of tokens and the mean of the entries seen; while all times are
    unknown, a token counts as one second. ``clamp`` bounds an entry's cost by the costs of the latest entries. Without
    this, an early entry with too high a prefill time would stay in the tier for ever.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._seen: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0
        self.median = 0.0  # of the latest entries; 0 while there are few

    def cost_per_byte(self, entry: Entry) -> float:
        """Return the cost of an entry, above 0, and learn from it."""
        found = self._claimed(entry) / max(entry.size_bytes, 1)
        self._seen.append(found)
        self._since += 1
        if self._since >= _MEDIAN_EVERY:
            self._since, self.median = 0, median_low(self._seen)
        return found

    def clamp(self, cost_per_byte: float, used: bool) -> float:
        """Return a cost within the range of the last entries."""
        return (
            min(cost_per_byte, self.median * (_MAX_RATIO_USED if used else _MAX_RATIO_UNUSED))
            if self.median
            else cost_per_byte
        )

    def _claimed(self, entry: Entry) -> float:
        seconds, most = entry.prefill_seconds, entry.tokens * MAX_TOKEN_SECONDS
        if isfinite(seconds) and seconds > 0:
            seconds = min(seconds, most)
            self._seconds += seconds
            self._tokens += entry.tokens
        else:
            seconds = entry.tokens * (self._seconds / self._tokens if self._tokens else 1.0)
        return max(seconds, 1e-9)
