"""Counters of misses by kind."""

from __future__ import annotations

import threading
from collections import Counter

from inference_svc.sequence.miss_kind import computed_tokens, kind_of, miss_reason
from inference_svc.sequence.sequence import Sequence


class MissCounts:
    """By kind of miss: completed requests with a miss, and the tokens that they computed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, self._tokens = Counter[str](), Counter[str]()

    def add(self, sequence: Sequence) -> None:
        """Count a completed request, once the connector has set the reason."""
        computed, reason = computed_tokens(sequence), miss_reason(sequence)
        if computed <= 1:
            return
        if reason is None:
            sequence.miss.add_done_callback(lambda found: self._count(kind_of(found.result()), computed))
        else:
            self._count(kind_of(reason), computed)

    def as_tuples(self) -> list[tuple[str, int, int]]:
        """Return kind, requests and tokens."""
        with self._lock:
            return [(kind, count, self._tokens[kind]) for kind, count in self._requests.items()]

    def _count(self, kind: str, tokens: int) -> None:
        with self._lock:
            self._requests[kind] += 1
            self._tokens[kind] += tokens
