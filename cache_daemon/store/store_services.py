"""Store components for the remote tier."""

from __future__ import annotations

from dataclasses import dataclass

from cache_daemon.store.chunk_deleter import ChunkDeleter
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.lookup import Lookup
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tier_manager import TierManager


@dataclass(frozen=True)
class StoreServices:
    """Components of one store that the remote tier uses.

    ``persistence`` is None without a durable tier.
    """

    tiers: TierManager
    deleter: ChunkDeleter
    inserter: ChunkInserter
    lookup: Lookup
    persistence: Persistence | None
    threads: StoreThreads

    async def wait_progress(self, seconds: float) -> bool:
        """Wait until a durable write ends; see ``Persistence.wait_progress``."""
        return self.persistence is not None and await self.persistence.wait_progress(seconds)
