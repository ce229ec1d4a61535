"""Taking up what an earlier start left in the durable tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from kvsidecar import keys

from cache_daemon.durable.tier import DurableTier, Loaded
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.tiers import Tiers


@dataclass(frozen=True)
class Restoring:
    """``note`` hears the name and value of every small value that was kept."""

    tiers: Tiers
    persistence: Persistence
    note: Callable[[bytes, bytes], None]

    async def restore(self, durable: DurableTier, reading: Executor) -> None:
        """Lists the tier's chunks, and tells of its notes. Reads on ``reading``."""
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(reading, lambda: list(durable.load()))
        notes = await loop.run_in_executor(reading, durable.notes)
        now = self.tiers.clock()
        await self.persistence.load(self._chunk(item, now) for item in loaded)
        self.tiers.counts.corrupt_chunks += durable.load_report.corrupt
        for name, value in notes.items():
            self.note(name, value)

    def _chunk(self, item: Loaded, now: float) -> Chunk:
        ids = keys.token_bytes(item.header.token_ids)
        item.header.ClearField("token_ids")
        tenant = self.tiers.accounts.of(item.header.tenant)
        used_at = min(now, item.last_use / 1000)
        if not item.last_use:  # it came in shortly before a sudden end: from now on that is known
            used_at = self.tiers.used[item.header.prefix_hash] = now
        return Chunk(
            item.header,
            ids,
            tenant,
            on_disk=Residency.PRESENT,
            stored_bytes=item.stored_bytes,
            used_at=used_at,
        )
