"""Latency model of the remote tier: round-trip time and bandwidth.

New measurements outweigh old measurements. Old measurements do not expire, because nothing suggests that an unused
backend has changed. While the model says that reads are too slow, no request reads, so the health probe must measure
from time to time.
"""

from __future__ import annotations

import time

# Faster answers weigh more than slower answers: many causes delay an answer, but only a faster backend speeds it up.
_SLOWER_WEIGHT, _FASTER_WEIGHT = 0.2, 0.5
# Smaller transfers say nothing about the bandwidth.
_MIN_TRANSFER_BYTES = 256 << 10
_MAX_BYTES_PER_SECOND = 1e12


class LatencyModel:
    """Running means. Before the first measurement reads are assumed to cost nothing."""

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0  # 0: unknown
        self.latency_measured_at = float("-inf")  # when the latency was measured, monotonic seconds
        self.bandwidth_measured_at = float("-inf")  # when the bandwidth was measured

    def record_round_trip(self, seconds: float, size_bytes: int = 0) -> None:
        """Record the round trip of a small answer."""
        spent = max(0.0, seconds - self._transfer_seconds(size_bytes))
        weight = _FASTER_WEIGHT if spent < self.latency_seconds else _SLOWER_WEIGHT
        known = self.latency_measured_at > float("-inf")
        self.latency_seconds = self.latency_seconds + weight * (spent - self.latency_seconds) if known else spent
        self.latency_measured_at = time.monotonic()

    def record_transfer(self, size_bytes: int, seconds: float) -> None:
        """Record a transfer of payloads, from the request to the last byte."""
        if size_bytes < _MIN_TRANSFER_BYTES:
            return
        rate = min(_MAX_BYTES_PER_SECOND, size_bytes / max(seconds - self.latency_seconds, seconds / 10, 1e-9))
        weight = _FASTER_WEIGHT if rate > self.bytes_per_second else _SLOWER_WEIGHT
        known = self.bytes_per_second > 0
        self.bytes_per_second = self.bytes_per_second + weight * (rate - self.bytes_per_second) if known else rate
        self.bandwidth_measured_at = time.monotonic()

    def record_timeout(self, seconds: float) -> None:
        """Record that a small answer had not arrived after ``seconds``."""
        self.latency_seconds = max(self.latency_seconds, seconds)

    def estimate_seconds(self, size_bytes: int, round_trips: int = 1) -> float:
        """Estimate the time to read ``size_bytes``."""
        return round_trips * self.latency_seconds + self._transfer_seconds(size_bytes)

    def _transfer_seconds(self, size_bytes: int) -> float:
        return size_bytes / self.bytes_per_second if self.bytes_per_second else 0.0

    def reset_latency(self) -> None:
        """Forget the latency, after an outage of the backend."""
        self.latency_seconds, self.latency_measured_at = 0.0, float("-inf")
