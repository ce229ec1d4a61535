"""A tier's books: which chunks it has, how many bytes they take, and which of them goes first, for whom.

Tenants with a quota have a part of their own: nobody else evicts from it, and they evict from nothing else once it is
full. All others share one part for each priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.tenant_usage import TenantAccount
from cache_daemon.tenant_limits import Priority, TenantLimits

PartitionKey = bytes | Priority


@dataclass(slots=True)
class _Partition:
    policy: EvictionPolicy
    used_bytes: int = 0


def _victims_of(policy: EvictionPolicy) -> Iterator[Chunk]:
    """A policy's victims, which are what was put in."""
    return cast(Iterator[Chunk], policy.victims())


@dataclass(slots=True)
class _Entry:
    partition: _Partition
    size_bytes: int
    parent: Chunk | None
    children: int = 0  # in this tier
    protected: bool = False  # whatever continues it
    unevictable: bool = False


@dataclass(eq=False)
class TierLedger:
    """``quota_of`` reads a tenant's limit for this tier."""

    new_policy: Callable[[], EvictionPolicy]
    quota_of: Callable[[TenantLimits], int | None]
    used_bytes: int = 0
    _partitions: dict[PartitionKey, _Partition] = field(default_factory=dict)
    _entries: dict[Chunk, _Entry] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._entries

    def insert(self, chunk: Chunk, size_bytes: int, parent: Chunk | None) -> None:
        """A chunk came in, after its parent if that is here."""
        part = self._partition_of(chunk.tenant)
        self._entries[chunk] = _Entry(part, size_bytes, parent)
        part.used_bytes += size_bytes
        self.used_bytes += size_bytes
        part.policy.insert(chunk, parent, chunk.hits)
        self._count_child(parent, 1)

    def remove(self, chunk: Chunk) -> None:
        """A chunk left. Unknown ones are ignored."""
        place = self._entries.pop(chunk, None)
        if place is not None:
            place.partition.used_bytes -= place.size_bytes
            self.used_bytes -= place.size_bytes
            place.partition.policy.remove(chunk)
            self._count_child(place.parent, -1)

    def resize(self, chunk: Chunk, size_bytes: int) -> None:
        """A chunk takes another number of bytes than was thought."""
        place = self._entries[chunk]
        more, place.size_bytes = size_bytes - place.size_bytes, size_bytes
        place.partition.used_bytes += more
        self.used_bytes += more

    def touch(self, chunk: Chunk) -> None:
        """A chunk was used."""
        place = self._entries.get(chunk)
        if place is not None:
            place.partition.policy.touch(chunk)

    def set_protected(self, chunk: Chunk, kept: bool) -> None:
        """Says whether a chunk must stay for other reasons than its children in this tier. Idempotent."""
        place = self._entries.get(chunk)
        if place is not None:
            place.protected = kept
            self._update_evictable(chunk, place)

    def _count_child(self, parent: Chunk | None, by: int) -> None:
        """A child came or left."""
        place = self._entries.get(parent) if parent is not None else None
        if parent is not None and place is not None:
            place.children += by
            self._update_evictable(parent, place)

    @staticmethod
    def _update_evictable(chunk: Chunk, place: _Entry) -> None:
        unevictable = place.protected or place.children > 0
        if unevictable is not place.unevictable:
            place.unevictable = unevictable
            (place.partition.policy.make_unevictable if unevictable else place.partition.policy.make_evictable)(chunk)

    def over_quota(self, tenant: TenantAccount, size_bytes: int) -> bool:
        """Whether so many bytes more are beyond the tenant's quota."""
        quota = self.quota_of(tenant.limits)
        return quota is not None and self._partition_of(tenant).used_bytes + size_bytes > quota

    def usage_of(self, tenant: TenantAccount) -> int:
        """Bytes of a tenant with a quota."""
        return self._partition_of(tenant).used_bytes

    def admits(self, chunk: Chunk, parent: Chunk | None) -> bool:
        """Whether a full tier takes a newcomer in."""
        return self._partition_of(chunk.tenant).policy.admit(chunk, parent)

    def victims(self, tenant: TenantAccount, own: bool) -> Iterator[Chunk]:
        """Chunks that may go for a tenant's newcomer, worst first; with ``own`` its own only. What others build on is
        not among them; the caller skips those in use, takes one, and asks anew."""
        if self.quota_of(tenant.limits) is not None:
            if not own:
                yield from self._shared(tenant.limits.priority)
            yield from _victims_of(self._partition_of(tenant).policy)
        elif own:
            yield from (c for c in self._shared(tenant.limits.priority) if c.tenant is tenant)
        else:
            yield from self._shared(tenant.limits.priority)

    def all_victims(self) -> Iterator[Chunk]:
        """Everybody's, of low priority first, those of tenants with a quota last."""
        names = sorted(self._partitions, key=lambda name: name if isinstance(name, Priority) else len(Priority))
        for name in names:
            yield from _victims_of(self._partitions[name].policy)

    def _shared(self, highest: Priority) -> Iterator[Chunk]:
        for priority in Priority:
            part = self._partitions.get(priority)
            if part is not None and priority <= highest:
                yield from _victims_of(part.policy)

    def _partition_of(self, tenant: TenantAccount) -> _Partition:
        name: PartitionKey = tenant.id if self.quota_of(tenant.limits) is not None else tenant.limits.priority
        part = self._partitions.get(name)
        if part is None:
            part = self._partitions[name] = _Partition(self.new_policy())
        return part

    def check_integrity(self) -> None:
        """Raises AssertionError unless the sums hold."""
        assert self.used_bytes == sum(p.size_bytes for p in self._entries.values()), "a tier's bytes do not add up"
        assert self.used_bytes == sum(p.used_bytes for p in self._partitions.values()), "its parts' bytes do not add up"
