"""Corrupt hits: reused keys and values with NaN or infinity.

Their chunks were damaged before the checksum was computed.
"""

from __future__ import annotations

import numpy as np
import structlog

from inference_svc.engine.engine_stats import EngineStats
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache, as_array
from inference_svc.sequence.kv_connector import KVConnector
from inference_svc.sequence.sequence import Sequence

log = structlog.get_logger("engine")


class CorruptHits:
    """Finds and drops corrupt hits, so that the prompt is computed instead. Only the engine's thread uses it."""

    def __init__(self, pool: KVPool, prefix_cache: PrefixCache, connector: KVConnector, stats: EngineStats) -> None:
        self._pool, self._prefix_cache, self._connector, self._stats = pool, prefix_cache, connector, stats

    def drop(self, sequence: Sequence) -> bool:
        """Drops a corrupt prefix: the sequence's blocks, cached sequences with this prefix, the daemon's chunks.

        False, with nothing changed, if all reused keys and values are finite.
        """
        kv = sequence.kv
        if kv.table is None or not sequence.reads_cache:
            return False
        reused = np.arange(kv.num_reused)
        if kv.plan is not None:
            reused = np.union1d(reused, kv.plan.approximate_positions)
        corrupt = self._pool.find_not_finite(kv.table, reused)
        if not len(corrupt):
            return False
        first = int(corrupt[0])
        log.warning("a reused prefix is not finite: dropped and computed", request=sequence.request.id, token=first)
        self._stats.corrupt_hits += 1
        self._connector.discard(sequence, first)
        self._prefix_cache.drop_corrupt(sequence.cache_scope, as_array(sequence.tokens[: first + 1]))
        self._pool.zero_exclusive(kv.table)
        self._pool.free(kv.table)
        kv.drop_prefix()
        return True
