"""What a tenant may have. Access reads it from a file, the store keeps to it."""

from __future__ import annotations

import enum
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
