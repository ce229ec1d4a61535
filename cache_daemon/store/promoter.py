"""Promoter: reads chunks from the durable tier into the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache_daemon.durable.durable_tier import DurableTier, ReadJob, ReadResult
from cache_daemon.memory.arena import Slot
from cache_daemon.store.arena_evictor import ArenaEvictor
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.store_threads import StoreThreads

# Maximal time that a reader waits for a full arena, which may be full of chunks that are being written to disk.
_ARENA_WAIT_SECONDS = 0.25


class Promoter:
    """Promotes leased chunks to the arena; without a durable tier, all chunks are there already."""

    def __init__(
        self,
        evictor: ArenaEvictor,
        durable: DurableTier | None,
        persistence: Persistence | None,
        threads: StoreThreads,
    ) -> None:
        self._tiers, self._evictor, self._durable = evictor.tiers, evictor, durable
        self._persistence, self._threads = persistence, threads

    async def promote(self, chunks: Sequence[Chunk]) -> None:
        """Load leased chunks into the arena, in order, until one does not fit."""
        jobs: list[tuple[Chunk, Slot]] = []
        waits: list[asyncio.Future[None]] = []
        try:
            for chunk in chunks:
                if chunk.arena_state is Residency.PRESENT:
                    continue
                if chunk.load_future is not None:
                    waits.append(chunk.load_future)
                    continue
                slot = await self._allocate(chunk)
                if chunk.arena_state is not Residency.ABSENT or not chunk.indexed:  # another request was faster
                    if slot is not None:
                        self._tiers.release_slot(slot)
                    if chunk.load_future is not None:
                        waits.append(chunk.load_future)
                    continue
                if slot is None:
                    break
                self._tiers.begin_load(chunk)
                jobs.append((chunk, slot))
        finally:
            # Shielded: a cancelled caller must not leave half-loaded chunks behind.
            loading = asyncio.ensure_future(self._load(jobs)) if jobs else None
        if loading is not None:
            await asyncio.shield(loading)
        if waits:
            await asyncio.wait(waits)

    async def _allocate(self, chunk: Chunk) -> Slot | None:
        slot = self._evictor.allocate(chunk.size_bytes, chunk.tenant)
        if (
            slot is None
            and self._persistence is not None
            and await self._persistence.wait_progress(_ARENA_WAIT_SECONDS)
        ):
            slot = self._evictor.allocate(chunk.size_bytes, chunk.tenant)
        return slot

    async def _load(self, jobs: Sequence[tuple[Chunk, Slot]]) -> None:
        durable = self._durable
        assert durable is not None

        def read() -> list[ReadResult]:
            arena = self._tiers.arena
            return durable.read([ReadJob(c.key, arena.read(slot), c.header.checksum) for c, slot in jobs])

        outcomes = [ReadResult.FAILED] * len(jobs)
        try:
            outcomes = await self._threads.read(read)
        finally:
            for (chunk, slot), outcome in zip(jobs, outcomes, strict=True):
                self._finish_load(chunk, slot, outcome)

    def _finish_load(self, chunk: Chunk, slot: Slot, outcome: ReadResult) -> None:
        load_future = self._tiers.end_load(chunk)
        if outcome is ReadResult.OK:
            self._tiers.finish_load(chunk, slot)
        else:
            self._tiers.release_slot(slot)
            # A chunk may be missing because the transaction of a longer sibling has just removed it. That chunk leaves
            # the index soon.
            replaced = outcome is ReadResult.MISSING and chunk.write_state.superseder_count > 0
            if outcome is ReadResult.FAILED:
                self._tiers.counters.failed_reads += 1
            elif chunk.indexed and not replaced:
                self._tiers.counters.corrupt_chunks += 1
                self._tiers.remove_subtree(chunk, LossCause.CORRUPT)
        self._tiers.on_released(chunk)
        if load_future is not None and not load_future.done():
            load_future.set_result(None)
