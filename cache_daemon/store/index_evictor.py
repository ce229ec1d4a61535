"""Index evictor: keeps the index within its memory, and tenants within their numbers of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.tier_quotas import TierQuotas
from cache_daemon.store.yield_timer import YieldTimer

log = structlog.get_logger("cache_daemon")


@dataclass
class IndexEvictor:
    """Removes chunks from both tiers. ``max_bytes`` limits ``PrefixIndex.memory_bytes``. Runs on the event loop."""

    tiers: TierManager
    max_bytes: float
    _has_evicted: bool = False

    def make_space(self, tenant: TenantAccount, tokens: int) -> LossCause | None:
        """Remove chunks until a tenant may have one more, and the index has memory for it.

        A tenant that has used its quota of entries loses its own chunks. Returns the limit that cannot be met, or None.
        """
        most = tenant.limits.entries
        while most is not None and tenant.entries >= most:
            if not self._remove_first(lambda quotas: quotas.victims(tenant, own=True), LossCause.ENTRY_QUOTA):
                return LossCause.ENTRY_QUOTA
        while self.tiers.index.memory_bytes(1, tokens) > self.max_bytes:
            if not self._remove_first(lambda quotas: quotas.victims(tenant, own=False), LossCause.INDEX_FULL):
                return LossCause.INDEX_FULL
            if not self._has_evicted:
                self._has_evicted = True
                log.warning("index_bytes is used up: new chunks replace old chunks", chunks=len(self.tiers.index))
        return None

    async def shrink(self) -> None:
        """Remove chunks of all tenants after a start, at which the index may have less memory than before."""
        yield_timer = YieldTimer()
        while self.tiers.index.memory_bytes() > self.max_bytes and self._remove_first(
            TierQuotas.all_victims, LossCause.INDEX_FULL
        ):
            await yield_timer.maybe_yield()

    def _remove_first(self, victims: Callable[[TierQuotas], Iterable[Chunk]], cause: LossCause) -> bool:
        """Remove the first of both tiers' victims that may leave both. Returns False if there is none."""
        tiers = self.tiers
        both = [quotas for quotas in (tiers.disk_quotas, tiers.arena_quotas) if quotas is not None]
        victim = next((c for quotas in both for c in victims(quotas) if self._may_leave(c)), None)
        if victim is None:
            return False
        tiers.counters.arena_evictions += victim.arena_state is Residency.PRESENT
        tiers.counters.durable_evictions += victim.disk_state is Residency.PRESENT
        tiers.remove_subtree(victim, cause)
        return True

    def _may_leave(self, chunk: Chunk) -> bool:
        """Return True if a chunk may leave both tiers."""
        return not (chunk.in_use or chunk.is_spared or chunk.anchors or self.tiers.index.has_children(chunk))
