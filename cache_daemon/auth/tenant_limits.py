"""Quotas, TTL and eviction priority of a tenant.

The tenants file sets them; the store enforces them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Priority(enum.IntEnum):
    """Eviction priority: a chunk never displaces a chunk of higher priority.

    Chunks of lower priority are evicted first.
    """

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True)
class TenantLimits:
    """Limits of one tenant; None is unlimited.

    A tenant with a quota in a tier has its own partition in that tier: no other tenant evicts chunks of the partition,
    and the partition never exceeds the quota.
    """

    arena_bytes: int | None = None
    store_bytes: int | None = None
    entries: int | None = None
    ttl_seconds: float | None = None
    pin_bytes: int | None = None
    priority: Priority = Priority.NORMAL
