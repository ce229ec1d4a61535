"""Preempted KV saver: stores a preempted sequence's keys and values before its blocks are freed."""

from __future__ import annotations

import structlog

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.kv_connector import KVConnector, SaveCallback
from inference_svc.sequence.sequence import Sequence, SequenceState

log = structlog.get_logger("engine")

# Storing and loading fewer tokens takes about as long as computing them again.
_MIN_SAVED_TOKENS = 128


class PreemptedKVSaver:
    """Saves of preempted sequences. Only the engine's thread uses it.

    The connector calls ``on_saved`` on another thread, with the stored prefix, or None if the save failed.
    """

    def __init__(self, pool: KVPool, connector: KVConnector, on_saved: SaveCallback) -> None:
        self._pool, self._connector, self._on_saved = pool, connector, on_saved
        self._pending: set[Sequence] = set()

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences whose blocks are being saved."""
        return list(self._pending)

    @property
    def pending_pages(self) -> int:
        """Number of blocks that will be free after the pending saves."""
        return sum(self._pool.count_exclusive_pages(s.kv.table) for s in self._pending if s.kv.table is not None)

    def save(self, sequence: Sequence) -> bool:
        """Starts to save a sequence that left the batch. False if it is too short or cannot be stored."""
        kv = sequence.kv
        saved = kv.stored.tokens
        if not sequence.can_resume or kv.table is None:
            return False
        if saved < kv.table.first_valid_token or kv.num_exact - saved < _MIN_SAVED_TOKENS:
            return False
        try:
            if not self._connector.save_part(sequence, self._pool, kv.table, kv.num_exact, self._on_saved):
                return False
        except Exception:  # the engine computes the tokens again instead
            log.exception("storing a preempted sequence failed", request=sequence.request.id)
            return False
        sequence.state = SequenceState.PREEMPTING
        self._pending.add(sequence)
        return True

    def finish(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Records the end of a save. The caller frees the blocks."""
        self._pending.discard(sequence)
        sequence.kv.record_stored(stored)
