"""Transfer statistics of a worker: tokens loaded, chunks stored, failures."""

from __future__ import annotations

import threading
from collections import Counter

COUNTERS = {
    "loaded_tokens": "Tokens whose keys and values were copied from the daemon; each rank counts its own.",
    "failed_loads": "Loads that broke off; what they were to bring was computed.",
    "load_seconds": "Seconds that loading took, on a thread of its own.",
    "stored_chunks": "Chunks that were stored.",
    "refused_chunks": "Chunks that the daemon did not take: no room, or over quota.",
    "failed_stores": "Stores that broke off.",
    "dropped_stores": "Requests that were not stored to the end, because too many blocks waited to be.",
}


class TransferStats:
    """Sums by the names of ``COUNTERS``. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._sums = threading.Lock(), Counter[str]()

    def add(self, **counts: float) -> None:
        with self._lock:
            self._sums.update(counts)

    def take(self) -> dict[str, float]:
        """Return and reset the sums; zeros are left out."""
        with self._lock:
            sums, self._sums = self._sums, Counter[str]()
        return {name: value for name, value in sums.items() if value}
