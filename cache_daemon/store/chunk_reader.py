"""Payloads of single chunks, for callers without shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from kvsidecar.errors import ArenaFull, ChunkNotFound

from cache_daemon.durable.durable_tier import DurableTier, ReadJob, ReadResult
from cache_daemon.memory.arena import Arena
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.lease_pin_limits import LeasePinLimit
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.lookup import Lookup
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tier_manager import TierManager


class ChunkReader:
    """Reads payloads from the arena or, without promotion, from the durable tier."""

    def __init__(self, tiers: TierManager, lookup: Lookup, durable: DurableTier | None, threads: StoreThreads) -> None:
        self._arena: Arena = tiers.arena
        self._tiers, self._lookup, self._durable, self._threads = tiers, lookup, durable, threads

    @contextlib.asynccontextmanager
    async def promoted(self, chunk: Chunk, usage: LeasePinLimit | None = None) -> AsyncIterator[memoryview]:
        """Lease a chunk's payload while a ``with`` block runs; ``usage`` counts an external caller's leases.

        Raises ArenaFull when the chunk cannot be promoted. Raises LimitExceeded when the caller already leases too
        much.
        """
        lease = await self._lookup.acquire(chunk, usage)
        if lease is None or chunk.slot is None:
            raise ArenaFull("the chunk is stored, but could not be brought into the arena; try again later")
        with lease:
            self._lookup.record_read(chunk)
            yield await self.leased(chunk)

    @contextlib.asynccontextmanager
    async def unchanged(self, chunk: Chunk) -> AsyncIterator[memoryview]:
        """Yield a payload without a change of tiers or use counts. Raises ChunkNotFound if it cannot be read."""
        if chunk.arena_state is Residency.PRESENT:
            with LeaseGuard([chunk], self._tiers.on_released):
                yield await self.leased(chunk)
            return
        durable, payload = self._durable, memoryview(bytearray(chunk.size_bytes))
        job = ReadJob(chunk.key, payload, chunk.header.checksum)
        if durable is None or (await self._threads.read(lambda: durable.read([job])))[0] is not ReadResult.OK:
            raise ChunkNotFound(f"the payload of chunk {chunk.key.hex()} cannot be read now")
        yield payload

    async def leased(self, chunk: Chunk) -> memoryview:
        """Return the payload of a leased chunk; a GPU arena copies it on a thread."""
        slot = chunk.slot
        assert slot is not None, "a leased chunk has a slot"
        return await self._threads.copy(lambda: self._arena.read(slot))
