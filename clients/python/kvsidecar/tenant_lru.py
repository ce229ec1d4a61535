"""Values of tenants in memory, bounded in bytes for each tenant and for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass
class _Tenant(Generic[V]):
    """One tenant's values with their sizes, the oldest first."""

    values: OrderedDict[str, tuple[V, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class TenantLru(Generic[V]):
    """Values by tenant; a tenant's new values evict its own oldest values.

    When all tenants together exceed ``max_bytes_in_all``, the tenant with the most bytes loses its oldest value. No
    tenant can read another tenant's values. Not thread-safe, except ``get`` and ``newest_first``.
    """

    def __init__(self, max_bytes: int, max_bytes_in_all: int, max_values: float = inf) -> None:
        self._max_bytes, self._max_in_all, self._max_values = max_bytes, max_bytes_in_all, max_values
        self._tenants: dict[Hashable, _Tenant[V]] = {}
        self.num_bytes = 0

    def put(self, tenant: Hashable, key: str, value: V, num_bytes: int) -> None:
        """Store a value as the tenant's newest; it replaces a value with the same key."""
        own = self._tenants.setdefault(tenant, _Tenant())
        if key in own.values:
            self._remove(own, key)
        own.values[key] = (value, num_bytes)
        own.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while own.num_bytes > self._max_bytes or len(own.values) > self._max_values:
            self._evict(own)
        while self.num_bytes > self._max_in_all:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._evict(self._tenants[largest])
            self._forget_if_empty(largest)
        self._forget_if_empty(tenant)

    def get(self, tenant: Hashable, key: str) -> V | None:
        """Return a value, or None."""
        own = self._tenants.get(tenant)
        found = None if own is None else own.values.get(key)
        return None if found is None else found[0]

    def touch(self, tenant: Hashable, key: str) -> None:
        """Make a stored value the tenant's newest."""
        self._tenants[tenant].values.move_to_end(key)

    def remove(self, tenant: Hashable, key: str) -> None:
        """Remove a stored value."""
        self._remove(self._tenants[tenant], key)
        self._forget_if_empty(tenant)

    def newest_first(self, tenant: Hashable) -> list[V]:
        """Return a tenant's values."""
        own = self._tenants.get(tenant)
        kept = [] if own is None else list(own.values.values())  # in one step: another thread may store
        return [value for value, _ in reversed(kept)]

    def values(self) -> list[V]:
        """Return the values of all tenants."""
        return [value for own in self._tenants.values() for value, _ in own.values.values()]

    def num_bytes_of(self, tenant: Hashable) -> int:
        own = self._tenants.get(tenant)
        return 0 if own is None else own.num_bytes

    def _remove(self, own: _Tenant[V], key: str) -> None:
        num_bytes = own.values.pop(key)[1]
        own.num_bytes -= num_bytes
        self.num_bytes -= num_bytes

    def _evict(self, own: _Tenant[V]) -> None:
        self._remove(own, next(iter(own.values)))

    def _forget_if_empty(self, tenant: Hashable) -> None:
        own = self._tenants.get(tenant)
        if own is not None and not own.values:
            del self._tenants[tenant]
