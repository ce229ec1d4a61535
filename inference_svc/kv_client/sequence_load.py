"""Sequence load: the state of one sequence's load."""

from __future__ import annotations

import threading

from kvsidecar.cache.v1.cache_pb2 import MatchResponse

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult
from inference_svc.sequence.sequence import Sequence


class SequenceLoad:
    """A load that reports its result to the engine exactly once. Thread-safe.

    Before ``claim``, no thread writes to the sequence's blocks, and the engine may abandon the load at any time.
    ``finished`` is set when no thread works on the load any more.
    """

    def __init__(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> None:
        self.sequence, self.pool = sequence, pool
        self.finished = threading.Event()
        self.answer: MatchResponse | None = None  # the daemon's answer to the lookup
        self._done, self._lock = done, threading.Lock()
        self._claimed = self._reported = False

    @property
    def wanted(self) -> bool:
        """True while the request still waits for its prefix."""
        return not self.sequence.cancelled.is_set() and self.sequence.queue.abort_error is None

    def claim(self) -> bool:
        """Claim the sequence's blocks until ``report``; False if the load was abandoned."""
        with self._lock:
            self._claimed = not self._reported and self.wanted
            return self._claimed

    def abandon(self) -> None:
        """Report an empty result, unless the blocks are claimed or the load is reported."""
        with self._lock:
            if self._claimed or self._reported:
                return
            self._reported = True
        self._done(self.sequence, LoadResult())

    def report(self, restored: LoadResult) -> None:
        """Report the result to the engine; later calls have no effect."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
        self._done(self.sequence, restored)
