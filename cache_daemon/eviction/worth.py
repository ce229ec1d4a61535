"""What a byte in a tier saves: seconds of prefill."""

from __future__ import annotations

from cache_daemon.eviction.policy import Entry


class Worth:
    """Seconds of prefill that an entry saves per byte. Where they are unknown they are taken from the tokens and the
    mean of the entries seen; if all are unknown, a token counts one second."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    def per_byte(self, entry: Entry) -> float:
        """Is positive. Learns from the entry."""
        seconds = entry.prefill_seconds
        if seconds > 0:
            self._seconds += seconds
            self._tokens += entry.tokens
        else:
            seconds = entry.tokens * (self._seconds / self._tokens if self._tokens else 1.0)
        return max(seconds, 1e-9) / max(entry.size_bytes, 1)
