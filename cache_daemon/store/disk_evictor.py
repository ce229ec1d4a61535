"""Disk evictor: keeps the durable tier within its budget, also in the background."""

from __future__ import annotations

import asyncio

import structlog

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.tier_quotas import TierQuotas
from cache_daemon.store.yield_timer import YieldTimer

# Eviction stops at the first share of the budget, so that it does not run at every write. If the disk is full although
# usage is below the budget, eviction stops at the second share of the current usage.
_LOW_WATERMARK, _FULL_DISK_WATERMARK = 0.95, 0.9
# If chunks still do not fit then, eviction goes on until this share of the chunks at the outage's start is left.
_FULL_DISK_FLOOR = 0.5
# Maximal number of background evictions before other work runs on the event loop; they take 4 to 25 ms.
_MAX_EXTRA_EVICTIONS = 64

log = structlog.get_logger("cache_daemon")


class DiskEvictor:
    """Evicts chunks of the durable tier, which may use ``budget_bytes``. Runs on the event loop."""

    def __init__(self, tiers: TierManager, quotas: TierQuotas, budget_bytes: int) -> None:
        self._tiers, self.quotas, self.budget_bytes = tiers, quotas, budget_bytes
        # Limit and eviction target of the tier; the limit is lower than the budget while the disk is full.
        self._max_bytes = self._target_bytes = float(budget_bytes)
        self._floor_bytes = 0.0  # see shrink_further

    def has_space(self, chunk: Chunk, size_bytes: int) -> bool:
        """Return True if a chunk fits into the tier without an eviction."""
        fits = self.quotas.used_bytes + size_bytes <= min(self.budget_bytes, self._max_bytes)
        return fits and not self.quotas.over_quota(chunk.tenant, size_bytes)

    def make_space(self, chunk: Chunk, parent: Chunk | None, size_bytes: int) -> bool:
        """Evict for a new chunk, if the tier admits it."""
        most = min(self.budget_bytes, self._max_bytes)
        if size_bytes > most or self.quotas.exceeds_quota(chunk.tenant, size_bytes):
            return False
        while self.quotas.over_quota(chunk.tenant, size_bytes):
            if not self._evict(chunk, own=True):
                return False
        if self.quotas.used_bytes + size_bytes > most:
            if not self.quotas.admits(chunk, parent):
                return False
            while self.quotas.used_bytes + size_bytes > most and self._evict(chunk, own=False):
                pass
            target, more = most * _LOW_WATERMARK - size_bytes, _MAX_EXTRA_EVICTIONS
            while self.quotas.used_bytes > target and more > 0 and self._evict(chunk, own=False):
                more -= 1
        return self.quotas.used_bytes + size_bytes <= most

    def _evict(self, newcomer: Chunk, own: bool) -> bool:
        """Evict the worst victim for a new chunk, but never the new chunk's parent."""
        victims = self.quotas.victims(newcomer.tenant, own)
        victim = next((c for c in victims if not c.in_use and c.key != newcomer.parent_key), None)
        if victim is None:
            return False
        self._tiers.evict_from_disk(victim, LossCause.DISK_QUOTA if own else LossCause.DISK_FULL)
        return True

    def begin_shrinking(self) -> None:
        """Evict in the background, because the disk is full below the budget."""
        self._floor_bytes = self.quotas.used_bytes * _FULL_DISK_FLOOR
        self._target_bytes = float(self.quotas.used_bytes)
        self.shrink_further()

    def shrink_further(self) -> None:
        """Evict again, because the disk is still full, but leave half of what was stored at ``begin_shrinking``."""
        if self._floor_bytes < self.quotas.used_bytes <= self._target_bytes:
            self._target_bytes = max(self._floor_bytes, self.quotas.used_bytes * _FULL_DISK_WATERMARK)
            self._shrink_some()

    def lower_limit(self) -> None:
        """Limit the tier to its present size, because the disk is full."""
        self._max_bytes = min(float(self.quotas.used_bytes), self._target_bytes)

    def reset_limit(self) -> None:
        """Allow the whole budget again, to learn whether the disk has space."""
        self._max_bytes = float(self.budget_bytes)

    async def shrink_to_budget(self) -> None:
        """Evict chunks beyond the budget after a start: the budget may have been reduced."""
        if self.quotas.used_bytes > self.budget_bytes:
            self._target_bytes = self.budget_bytes * _LOW_WATERMARK
            yield_timer = YieldTimer()
            while self._shrink_once(_MAX_EXTRA_EVICTIONS):
                await yield_timer.maybe_yield()

    def _shrink_some(self) -> None:
        """Evict some chunks, and schedule this method again if more must be evicted."""
        if self._shrink_once(_MAX_EXTRA_EVICTIONS):
            asyncio.get_running_loop().call_soon(self._shrink_some)

    def _shrink_once(self, most: int) -> bool:
        """Evict up to ``most`` victims of all tenants until the target is met.

        Returns True if more must be evicted.
        """
        for _ in range(most):
            if self.quotas.used_bytes <= self._target_bytes:
                return False
            victim = next((c for c in self.quotas.all_victims() if not c.in_use), None)
            if victim is None:
                log.warning("the durable tier cannot shrink: all its chunks are pinned or in use")
                return False
            self._tiers.evict_from_disk(victim)
        return self.quotas.used_bytes > self._target_bytes
