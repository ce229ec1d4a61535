"""Restores chunks and notes of the durable tier at start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog
from kvsidecar import keys

from cache_daemon.durable.durable_tier import DurableTier, Loaded
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.persistence import Persistence

_CHUNKS_PER_SLICE = 500

log = structlog.get_logger("cache_daemon")


@dataclass(frozen=True)
class IndexRestorer:
    """Indexes the chunks that an earlier start made durable.

    ``note`` is called with the name and value of every note.
    """

    inserter: ChunkInserter
    persistence: Persistence
    note: Callable[[bytes, bytes], None]

    async def restore(self, durable: DurableTier, reading: Executor) -> None:
        """Index the durable tier's chunks and dispatch its notes. Reads run on ``reading``."""
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(reading, lambda: list(durable.load()))
        notes = await loop.run_in_executor(reading, durable.notes)
        tiers = self.inserter.tiers
        tiers.clock.advance_to(max((item.last_use for item in loaded), default=0) / 1000)
        now = tiers.clock()
        unfit = 0
        for n, item in enumerate(loaded):
            if not self.inserter.restore(self._chunk(item, now)):
                self.persistence.discard(item.header.prefix_hash)
                unfit += 1
            if n % _CHUNKS_PER_SLICE == 0:
                await asyncio.sleep(0)
        if unfit:
            log.warning("removing stored chunks that do not follow their parents", chunks=unfit)
        tiers.counters.corrupt_chunks += durable.load_report.corrupt + unfit
        for name, value in notes.items():
            self.note(name, value)

    def _chunk(self, item: Loaded, now: float) -> Chunk:
        ids = keys.token_bytes(item.header.token_ids)
        item.header.ClearField("token_ids")
        tiers = self.inserter.tiers
        tenant = tiers.accounts.account_of(item.header.tenant)
        used_at = min(now, item.last_use / 1000)
        if not item.last_use:  # stored shortly before a crash, without a recency record: persist one
            used_at = tiers.unsaved_recency[item.header.prefix_hash] = now
        return Chunk(
            item.header,
            ids,
            tenant,
            disk_state=Residency.PRESENT,
            stored_bytes=item.stored_bytes,
            last_used_at=used_at,
        )
