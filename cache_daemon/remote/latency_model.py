"""What the remote tier costs, as measured: the time until a small answer comes, and bytes per second after that.

Old measurements fade by the number of new ones, not by time: what is not used is not known to have changed. So somebody
has to measure now and then while nothing is read because it would be too slow.
"""

from __future__ import annotations

import time

# Good news counts more than bad: an answer is late for many reasons, and early for one.
_WORSE, _BETTER = 0.2, 0.5
# A transfer of fewer bytes says nothing about what a byte costs.
_LEAST_BYTES = 256 << 10
_FASTEST = 1e12


class Figures:
    """Running means. Nothing is known at first, and then the best is hoped for."""

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0  # 0: not known
        self.looked_at = float("-inf")  # when the latency was measured, monotonic seconds
        self.moved_at = float("-inf")  # when the bandwidth was

    def looked(self, seconds: float, size_bytes: int = 0) -> None:
        """Records a small answer."""
        spent = max(0.0, seconds - self._seconds_for(size_bytes))
        weight = _BETTER if spent < self.latency_seconds else _WORSE
        known = self.looked_at > float("-inf")
        self.latency_seconds = self.latency_seconds + weight * (spent - self.latency_seconds) if known else spent
        self.looked_at = time.monotonic()

    def moved(self, size_bytes: int, seconds: float) -> None:
        """Records a transfer of payloads, from asking for them to having all of them."""
        if size_bytes < _LEAST_BYTES:
            return
        rate = min(_FASTEST, size_bytes / max(seconds - self.latency_seconds, seconds / 10, 1e-9))
        weight = _BETTER if rate > self.bytes_per_second else _WORSE
        known = self.bytes_per_second > 0
        self.bytes_per_second = self.bytes_per_second + weight * (rate - self.bytes_per_second) if known else rate
        self.moved_at = time.monotonic()

    def timed_out(self, seconds: float) -> None:
        """A small answer had not come after so many seconds."""
        self.latency_seconds = max(self.latency_seconds, seconds)

    def seconds(self, size_bytes: int, round_trips: int = 1) -> float:
        """What reading so much will take."""
        return round_trips * self.latency_seconds + self._seconds_for(size_bytes)

    def _seconds_for(self, size_bytes: int) -> float:
        return size_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def forget(self) -> None:
        """The engine was away: what it cost before says little."""
        self.latency_seconds, self.looked_at = 0.0, float("-inf")
