"""Periodic upkeep of a store: retries, trimming, recency, lease expiry, TTL sweep."""

from __future__ import annotations

import asyncio

import structlog
from kvsidecar.process.background_task import BackgroundTask

from cache_daemon.store.chunk_deleter import ChunkDeleter
from cache_daemon.store.counters import Counters
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.retained_chunks import RetainedChunks
from cache_daemon.store.sessions import SessionTable
from cache_daemon.store.ttl import TtlIndex

_TICK_SECONDS, _RECENCY_TICKS = 1.0, 15

log = structlog.get_logger("cache_daemon")


class Upkeep(BackgroundTask):
    """A task that runs once a second from ``start`` to ``stop``.

    ``persistence`` is None without a durable tier.
    """

    def __init__(
        self,
        sessions: SessionTable,
        deleter: ChunkDeleter,
        counters: Counters,
        ttl: TtlIndex,
        retained: RetainedChunks,
        persistence: Persistence | None,
    ) -> None:
        super().__init__(self._run)
        self._sessions, self._deleter, self._counters = sessions, deleter, counters
        self._ttl, self._retained, self._persistence = ttl, retained, persistence

    async def _run(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            tick += 1
            try:
                await self._tick(tick)
            except Exception:
                log.exception("upkeep failed, going on")

    async def _tick(self, tick: int) -> None:
        for session in self._sessions:
            if session.staging is not None:
                session.staging.trim()
        if self._persistence is not None:
            self._persistence.retry()
            if tick % _RECENCY_TICKS == 0:
                self._persistence.write_recency()
                self._ttl.persist_changes()
        self._sessions.expire_leases()
        await self.sweep()

    async def sweep(self) -> None:
        """Remove expired chunks, and end retentions."""
        await self._retained.end_due()
        self._counters.expired_chunks += await self._deleter.expire()
