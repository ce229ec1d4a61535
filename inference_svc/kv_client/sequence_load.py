"""One sequence's load, from the question to its pages."""

from __future__ import annotations

import threading

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult
from inference_svc.sequence.sequence import Sequence


class SequenceLoad:
    """A load that tells the engine its result once. Thread-safe.

    Until ``claim`` nobody reads the sequence's pages, and the engine can have them back at any time. ``over`` is set
    when the last thread is done with the load.
    """

    def __init__(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> None:
        self.sequence, self.pool = sequence, pool
        self.finished = threading.Event()
        self._done, self._lock = done, threading.Lock()
        self._claimed = self._reported = False

    @property
    def wanted(self) -> bool:
        """Whether the request still waits for its prefix."""
        return not self.sequence.cancelled.is_set() and self.sequence.queue.abort_error is None

    def claim(self) -> bool:
        """Takes the sequence's pages until the load tells its result; False when the engine has them back."""
        with self._lock:
            self._claimed = not self._reported and self.wanted
            return self._claimed

    def abandon(self) -> None:
        """Gives the pages back to the engine unless somebody writes to them."""
        with self._lock:
            if self._claimed or self._reported:
                return
            self._reported = True
        self._done(self.sequence, LoadResult())

    def report(self, restored: LoadResult) -> None:
        """Tells the engine, unless it was told before."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
        self._done(self.sequence, restored)
