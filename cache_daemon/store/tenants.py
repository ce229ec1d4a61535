"""What tenants may use, and what they use."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Priority(enum.IntEnum):
    """Whose chunks go first when a tier is full, and whose newcomers may push whom out."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True)
class TenantLimits:
    """None is without limit. A tenant with a quota of a tier has a part of it that nobody else evicts from, and never
    uses more."""

    arena_bytes: int | None = None
    store_bytes: int | None = None
    entries: int | None = None
    ttl_seconds: float | None = None
    pin_bytes: int | None = None
    priority: Priority = Priority.NORMAL


@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant's account, over all namespaces."""

    id: bytes
    limits: TenantLimits
    entries: int = 0
    pinned_bytes: int = 0

    def expired(self, idle_seconds: float) -> bool:
        """Whether a chunk that was not used for so long has passed its time to live."""
        ttl = self.limits.ttl_seconds
        return ttl is not None and idle_seconds > ttl


class Accounts:
    """The tenants that have chunks. ``limits_of`` knows the limits by tenant id."""

    def __init__(self, limits_of: Callable[[bytes], TenantLimits] | None = None) -> None:
        self._limits_of = limits_of or (lambda _: TenantLimits())
        self._tenants: dict[bytes, Tenant] = {}

    def of(self, tenant_id: bytes) -> Tenant:
        found = self._tenants.get(tenant_id)
        if found is None:
            found = self._tenants[tenant_id] = Tenant(tenant_id, self._limits_of(tenant_id))
        return found

    def drop_unused(self, used: set[bytes]) -> None:
        """Forgets accounts that have no chunks and are not among ``used``."""
        self._tenants = {k: t for k, t in self._tenants.items() if t.entries or k in used}

    @property
    def any_ttl(self) -> bool:
        """Whether any chunk can expire."""
        return any(t.limits.ttl_seconds is not None for t in self._tenants.values())

    def __len__(self) -> int:
        return len(self._tenants)
