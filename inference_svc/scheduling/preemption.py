"""Preempted sequences: what they computed is stored before their pages go, so that it need not be computed again."""

from __future__ import annotations

import structlog

from inference_svc.engine.kv_connector import KVConnector, SaveCallback
from inference_svc.engine.sequence import Sequence, SequenceState, StoredPrefix
from inference_svc.kv_pool.kv_pool import KVPool

log = structlog.get_logger("engine")

# Fewer tokens are computed again in about the time that storing and loading them takes.
_MIN_SAVED_TOKENS = 128


class PreemptionSaver:
    """Sequences whose pages go as soon as they are stored. Only the engine's thread uses it. ``saved`` hears, on
    another one, that they are, or that they could not be."""

    def __init__(self, pool: KVPool, cache: KVConnector, saved: SaveCallback) -> None:
        self._pool, self._cache, self._saved = pool, cache, saved
        self._going: set[Sequence] = set()

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._going)

    @property
    def pages(self) -> int:
        """How many will be free then."""
        return sum(self._pool.own_pages(s.table) for s in self._going if s.table is not None)

    def begin(self, sequence: Sequence) -> bool:
        """Begins to store a sequence that is in no list of the engine's any more. False when there is too little, or
        nobody to store it."""
        use, table, before = sequence.cache, sequence.table, sequence.stored.tokens
        loaded = sequence.gate is None or sequence.gate.complete
        if not (use.read and use.write and loaded) or table is None or before < table.since:
            return False
        if sequence.reusable - before < _MIN_SAVED_TOKENS:
            return False
        try:
            if not self._cache.save_part(sequence, self._pool, table, sequence.reusable, self._saved):
                return False
        except Exception:  # it is computed again then
            log.exception("storing failed", request=sequence.id)
            return False
        sequence.state = SequenceState.SAVING
        self._going.add(sequence)
        return True

    def end(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        """Its pages may go."""
        self._going.discard(sequence)
        sequence.stored = stored or sequence.stored
