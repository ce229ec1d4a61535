"""Reused keys and values that are not finite: a chunk that was damaged before it got its checksum, or imported so."""

from __future__ import annotations

import numpy as np
import structlog

from inference_svc.engine.engine_stats import EngineStats
from inference_svc.engine.kv_connector import KVConnector
from inference_svc.engine.sequence import Sequence, StoredPrefix
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.scheduling.admission import as_array

log = structlog.get_logger("engine")


class CorruptHits:
    """Finds and drops them, so that the prompt can be computed. Only the engine's thread uses it."""

    def __init__(self, pool: KVPool, residents: PrefixCache, cache: KVConnector, stats: EngineStats) -> None:
        self._pool, self._residents, self._cache, self._stats = pool, residents, cache, stats

    def drop(self, sequence: Sequence) -> bool:
        """Drops what a sequence reused, whose logits are not finite: its pages, residents with the same damage, and the
        daemon's chunks. False, with nothing changed, where all that it reused is finite."""
        table = sequence.table
        if table is None or not sequence.cache.read:
            return False
        reused = np.arange(sequence.reused)
        if sequence.plan is not None:
            reused = np.union1d(reused, sequence.plan.approximate_positions)
        corrupt = self._pool.not_finite(table, reused)
        if not len(corrupt):
            return False
        first = int(corrupt[0])
        log.warning("a reused prefix is not finite: it is dropped and computed", request=sequence.id, token=first)
        self._stats.corrupt_hits += 1
        self._cache.discard(sequence, first)
        self._residents.drop_sharing(sequence.realm, as_array(sequence.tokens[: first + 1]))
        self._pool.erase(table)
        self._pool.free(table)
        sequence.table, sequence.gate, sequence.stored = None, None, StoredPrefix()
        return True
