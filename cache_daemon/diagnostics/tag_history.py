"""Bounded history of tagged token runs, searched for the longest common prefix."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from sortedcontainers import SortedDict

from cache_daemon.diagnostics.token_tags import TAG_BYTES
from cache_daemon.store.common_bytes import nearest

T = TypeVar("T")
# Estimated memory of an entry besides its tags: its objects, and its slots in three maps.
_ENTRY_BYTES = 400


class TaggedRun(NamedTuple, Generic[T]):
    """Time and value that were recorded with a run."""

    at: float
    value: T


@dataclass(slots=True)
class _TenantPart:
    size_bytes: int = 0
    keys: OrderedDict[tuple[bytes, bytes], int] = field(default_factory=OrderedDict)  # oldest first, with sizes


class TagHistory(Generic[T]):
    """Token runs, grouped by the prefix that they continue; the oldest are dropped first.

    ``max_bytes`` bounds the estimated size of all runs, and ``max_tenant_bytes`` the size of one tenant's runs.
    ``started_at`` is the time when the recording began, on the same clock as ``at`` in ``add``.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int, started_at: float) -> None:
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self._groups: dict[bytes, SortedDict[bytes, TaggedRun[T]]] = {}
        self._tenants: dict[bytes, _TenantPart] = {}
        self._order: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()  # (group, tags) -> tenant
        self._forgotten: dict[bytes, float] = {}  # tenant with runs -> time of its newest dropped run
        self._started_at = self._forgotten_at = started_at
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, group: bytes) -> bool:
        return group in self._groups

    def add(self, tenant: bytes, group: bytes, tags: bytes, at: float, value: T) -> None:
        """Record a run; it replaces an equal run of the group."""
        key, size = (group, tags), len(tags) + _ENTRY_BYTES
        if key in self._order:
            self._remove(key)
        runs = self._groups.get(group)
        if runs is None:
            runs = self._groups[group] = SortedDict()
        runs[tags] = TaggedRun(at, value)
        part = self._tenants.setdefault(tenant, _TenantPart())
        part.keys[key] = size
        part.size_bytes += size
        self._order[key] = tenant
        self.size_bytes += size
        while part.size_bytes > self._max_tenant_bytes:
            self._drop(next(iter(part.keys)))
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._order)))

    def nearest(self, group: bytes, tags: bytes) -> tuple[int, TaggedRun[T]] | None:
        """Find the run with the longest common prefix; return the number of common tokens and the run."""
        runs = self._groups.get(group)
        if runs is None:
            return None
        found: tuple[TaggedRun[T], int] = nearest(runs, tags, TAG_BYTES)
        return found[1] // TAG_BYTES, found[0]

    def reaches_back_to(self, tenant: bytes) -> float:
        """Return a time; all runs of the tenant that were recorded after it are still kept."""
        return self._forgotten.get(tenant, self._started_at if tenant in self._tenants else self._forgotten_at)

    def size_of(self, tenant: bytes) -> int:
        """Return the bytes that a tenant's runs take."""
        part = self._tenants.get(tenant)
        return 0 if part is None else part.size_bytes

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        tenant, run = self._order[key], self._groups[key[0]][key[1]]
        self._forgotten[tenant] = self._forgotten_at = run.at
        self._remove(key)
        if tenant not in self._tenants:
            del self._forgotten[tenant]

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        tenant = self._order.pop(key)
        part, runs = self._tenants[tenant], self._groups[key[0]]
        size = part.keys.pop(key)
        part.size_bytes -= size
        self.size_bytes -= size
        del runs[key[1]]
        if not runs:
            del self._groups[key[0]]
        if not part.keys:
            del self._tenants[tenant]
