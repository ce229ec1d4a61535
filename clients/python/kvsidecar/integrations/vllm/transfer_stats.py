"""Statistics of the connector: loaded tokens, stored chunks, failures, and lookups by outcome."""

from __future__ import annotations

import threading
from collections import Counter

COUNTERS = {
    "loaded_tokens": "Tokens whose keys and values were copied from the daemon; each rank counts its own.",
    "failed_loads": "Loads that failed before their end; the engine computed the missing tokens.",
    "loaded_bytes": "Payload bytes of these tokens.",
    "saved_prefill_seconds": "Estimated seconds that computing the loaded tokens would have taken.",
    "load_seconds": "Seconds that loads took, on a thread of their own.",
    "stored_chunks": "Chunks that were stored.",
    "stored_bytes": "Payload bytes of these chunks.",
    "refused_chunks": "Chunks that the daemon refused: no space, or over quota.",
    "failed_stores": "Stores that failed.",
    "dropped_stores": "Requests that were not stored completely, because too many blocks were queued.",
    "applied_hints": "Actions in the KV hints of requests that had an effect.",
    "ignored_hints": "Actions in the KV hints of requests that are unknown or malformed.",
}
LOOKUPS = {
    "hit": "a stored prefix",
    "miss": "no stored prefix",
    "skipped": "the daemon's Bloom filter excludes the prompt, so no call was made",
    "detached": "no session with the daemon",
    "failed": "the call failed or took too long",
}
ATTACHED = "attached"


class TransferStats:
    """Sums under the names in ``COUNTERS``, and ``lookups.OUTCOME`` for each outcome in ``LOOKUPS``. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._sums = threading.Lock(), Counter[str]()

    def add(self, **counts: float) -> None:
        with self._lock:
            self._sums.update(counts)

    def count_lookup(self, outcome: str) -> None:
        """Count a lookup by its outcome, a key of ``LOOKUPS``."""
        with self._lock:
            self._sums[f"lookups.{outcome}"] += 1

    def take(self) -> dict[str, float]:
        """Return the sums, without zeros, and reset them."""
        with self._lock:
            sums, self._sums = self._sums, Counter[str]()
        return {name: value for name, value in sums.items() if value}
