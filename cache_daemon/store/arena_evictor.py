"""Arena evictor: admits payloads to a full arena by evicting other chunks."""

from __future__ import annotations

from dataclasses import dataclass

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager

# One allocation evicts at most this multiple of its size; then it gives up, even without a contiguous slot.
_MAX_EVICTED_FACTOR = 16
_MIN_EVICTED_BYTES = 64 << 20


@dataclass(frozen=True)
class ArenaEvictor:
    """Allocates arena slots, and evicts the policy's victims to make space."""

    tiers: TierManager

    def allocate(self, size_bytes: int, tenant: TenantAccount) -> Slot | None:
        """Allocate an arena slot for a new payload, evicting chunks if necessary.

        Returns None when every remaining chunk is in use, pinned, or protected by another tenant's quota. The caller
        passes the slot to the tier manager's ``index_chunk``, ``finish_load`` or ``release_slot``.
        """
        if size_bytes > self.tiers.arena.size_bytes or self.tiers.arena_quotas.exceeds_quota(
            tenant, footprint(size_bytes)
        ):
            return None
        while self.over_quota(tenant, size_bytes):
            if not self._evict(tenant, own=True):
                return None
        evicted = 0
        while (slot := self.tiers.take_slot(size_bytes, tenant)) is None:
            if evicted > max(_MAX_EVICTED_FACTOR * size_bytes, _MIN_EVICTED_BYTES):
                return None  # enough is free, but not contiguous
            freed = self._evict(tenant, own=False)
            if not freed:
                return None
            evicted += freed
        return slot

    def over_quota(self, tenant: TenantAccount, size_bytes: int) -> bool:
        """Return True if a payload exceeds the tenant's arena quota.

        Slots that are still being filled count as used.
        """
        if tenant.limits.arena_bytes is None:
            return False
        pending = self.tiers.pending_slots.items()
        pending_bytes = sum(footprint(slot.size_bytes) for slot, owner in pending if owner is tenant)
        return self.tiers.arena_quotas.over_quota(tenant, pending_bytes + footprint(size_bytes))

    def _evict(self, tenant: TenantAccount, own: bool) -> int:
        """Evict one chunk. Returns the bytes freed; 0 when no chunk can be evicted."""
        victim = next((c for c in self.tiers.arena_quotas.victims(tenant, own) if not c.in_use), None)
        if victim is None:
            return 0
        self.tiers.evict_from_arena(victim, LossCause.ARENA_QUOTA if own else LossCause.ARENA_FULL)
        return victim.size_bytes
