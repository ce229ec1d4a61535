"""Quotas of one tier: usage of each tenant, partitions, and eviction victims.

A tenant with a quota has its own partitions. Other tenants never evict chunks from these, and a tenant that has used
its quota evicts only its own chunks. All other tenants share one partition per priority. Chunks of low priority are
evicted first. A tenant with a quota has a second partition for its chunks of low priority; all other tenants share the
lowest partition for them. In a shared partition, a tenant with a quota of entries has a second policy that orders its
own chunks, so that it finds its own victims without a scan of the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

from cache_daemon.auth.tenant_limits import Priority, TenantLimits
from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.tenant_accounts import TenantAccount

PartitionKey = bytes | Priority
_LOW = b"low "  # + id of a tenant with a quota: key of the partition of its chunks of low priority


@dataclass(slots=True)
class _Partition:
    policy: EvictionPolicy
    used_bytes: int = 0
    tenant_policies: WeakKeyDictionary[TenantAccount, EvictionPolicy] = field(default_factory=WeakKeyDictionary)


def _victims_of(policy: EvictionPolicy) -> Iterator[Chunk]:
    """Return a policy's victims with the type that was inserted."""
    return cast(Iterator[Chunk], policy.victims())


@dataclass(slots=True)
class _Entry:
    partition: _Partition
    policies: tuple[EvictionPolicy, ...]  # the partition's, and the tenant's second one
    size_bytes: int
    parent: Chunk | None
    parent_entry: _Entry | None  # in this tier; the parent may leave the tier and enter it again before its children
    children: int = 0  # number of children in this tier
    protected: bool = False  # protected even without children
    unevictable: bool = False


@dataclass(eq=False)
class TierQuotas:
    """Usage and eviction partitions of one tier.

    ``quota_of`` returns a tenant's limit for this tier.
    """

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
        """Add a chunk; if this tier has its parent, the parent was added before."""
        part = self._partition_of(chunk.tenant, chunk.low_priority)
        above = self._entries.get(parent) if parent is not None else None
        place = self._entries[chunk] = _Entry(part, self._policies_of(part, chunk.tenant), size_bytes, parent, above)
        part.used_bytes += size_bytes
        self.used_bytes += size_bytes
        for policy in place.policies:
            policy.insert(chunk, parent, chunk.hits)
        self._count_child(place, 1)

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk; ignore an unknown chunk."""
        place = self._entries.pop(chunk, None)
        if place is not None:
            place.partition.used_bytes -= place.size_bytes
            self.used_bytes -= place.size_bytes
            for policy in place.policies:
                policy.remove(chunk)
            self._count_child(place, -1)

    def resize(self, chunk: Chunk, size_bytes: int) -> None:
        """Correct the size of a chunk."""
        place = self._entries[chunk]
        more, place.size_bytes = size_bytes - place.size_bytes, size_bytes
        place.partition.used_bytes += more
        self.used_bytes += more

    def move(self, chunk: Chunk) -> None:
        """Move a chunk to the partition that its priority and its tenant's limits name; ignore an unknown chunk."""
        place = self._entries.get(chunk)
        if place is None:
            return
        partition = self._partition_of(chunk.tenant, chunk.low_priority)
        before, place.policies = place.policies, self._policies_of(partition, chunk.tenant)
        place.partition.used_bytes -= place.size_bytes
        place.partition = partition
        place.partition.used_bytes += place.size_bytes
        for policy in before:
            if policy not in place.policies:
                policy.remove(chunk)
        for policy in place.policies:
            if policy not in before:
                policy.insert(chunk, place.parent, chunk.hits)
                if place.unevictable:
                    policy.make_unevictable(chunk)

    def touch(self, chunk: Chunk) -> None:
        """Record a use of a chunk."""
        place = self._entries.get(chunk)
        if place is not None:
            for policy in place.policies:
                policy.touch(chunk)

    def set_protected(self, chunk: Chunk, kept: bool) -> None:
        """Set or end the protection of a chunk from eviction. Idempotent.

        Independently of that, a chunk with children in this tier is never evicted.
        """
        place = self._entries.get(chunk)
        if place is not None:
            place.protected = kept
            self._update_evictable(chunk, place)

    def _count_child(self, child: _Entry, by: int) -> None:
        """Add to the number of children of a child's parent, if the parent's entry is still in this tier."""
        parent, above = child.parent, child.parent_entry
        if parent is not None and above is not None and self._entries.get(parent) is above:
            above.children += by
            self._update_evictable(parent, above)

    @staticmethod
    def _update_evictable(chunk: Chunk, place: _Entry) -> None:
        unevictable = place.protected or place.children > 0
        if unevictable is not place.unevictable:
            place.unevictable = unevictable
            for policy in place.policies:
                (policy.make_unevictable if unevictable else policy.make_evictable)(chunk)

    def over_quota(self, tenant: TenantAccount, size_bytes: int) -> bool:
        """Return True if ``size_bytes`` more bytes would exceed the tenant's quota."""
        quota = self.quota_of(tenant.limits)
        return quota is not None and self.usage_of(tenant) + size_bytes > quota

    def exceeds_quota(self, tenant: TenantAccount, size_bytes: int) -> bool:
        """Return True if ``size_bytes`` alone exceed the tenant's quota, so that no eviction helps."""
        quota = self.quota_of(tenant.limits)
        return quota is not None and size_bytes > quota

    def usage_of(self, tenant: TenantAccount) -> int:
        """Return the bytes used by a tenant that has a quota."""
        return sum(part.used_bytes for part in self._own(tenant))

    def admits(self, chunk: Chunk, parent: Chunk | None) -> bool:
        """Return True if a full tier admits a new chunk."""
        return self._partition_of(chunk.tenant, chunk.low_priority).policy.admit(chunk, parent)

    def victims(self, tenant: TenantAccount, own: bool) -> Iterator[Chunk]:
        """Yield chunks to evict for a tenant's new chunk, worst first.

        With ``own``, yields only chunks of this tenant, which has a quota of bytes or entries. Leaves out chunks with
        children in this tier. The caller skips chunks in use, evicts the next chunk, and calls again for further
        victims.
        """
        if self.quota_of(tenant.limits) is not None:
            if not own:
                yield from self._shared(tenant.limits.priority)
            for part in self._own(tenant):
                yield from _victims_of(part.policy)
        elif own:
            for part in self._shared_partitions(tenant.limits.priority):
                if (policy := part.tenant_policies.get(tenant)) is not None:
                    yield from _victims_of(policy)
        else:
            yield from self._shared(tenant.limits.priority)

    def all_victims(self) -> Iterator[Chunk]:
        """Yield victims of all tenants: low priority first, tenants with a quota last."""
        names = sorted(
            self._partitions,
            key=lambda name: name if isinstance(name, Priority) else len(Priority) + (not name.startswith(_LOW)),
        )
        for name in names:
            yield from _victims_of(self._partitions[name].policy)

    def _shared(self, highest: Priority) -> Iterator[Chunk]:
        for part in self._shared_partitions(highest):
            yield from _victims_of(part.policy)

    def _shared_partitions(self, highest: Priority) -> list[_Partition]:
        """Return the partitions of tenants without a quota of bytes, low priority first."""
        parts = (self._partitions.get(priority) for priority in Priority if priority <= highest)
        return [part for part in parts if part is not None]

    def _own(self, tenant: TenantAccount) -> list[_Partition]:
        """Return the partitions of a tenant with a quota, low priority first."""
        parts = (self._partitions.get(name) for name in (_LOW + tenant.id, tenant.id))
        return [part for part in parts if part is not None]

    def _partition_of(self, tenant: TenantAccount, low_priority: bool) -> _Partition:
        name: PartitionKey
        if self.quota_of(tenant.limits) is not None:
            name = _LOW + tenant.id if low_priority else tenant.id
        else:
            name = Priority.LOW if low_priority else tenant.limits.priority
        part = self._partitions.get(name)
        if part is None:
            part = self._partitions[name] = _Partition(self.new_policy())
        return part

    def _policies_of(self, part: _Partition, tenant: TenantAccount) -> tuple[EvictionPolicy, ...]:
        """Return the policies that order a tenant's chunks in a partition."""
        if tenant.limits.entries is None or self.quota_of(tenant.limits) is not None:
            return (part.policy,)
        own = part.tenant_policies.get(tenant)
        if own is None:
            own = part.tenant_policies[tenant] = self.new_policy()
        return part.policy, own

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums hold."""
        assert self.used_bytes == sum(p.size_bytes for p in self._entries.values()), "a tier's bytes do not add up"
        assert self.used_bytes == sum(p.used_bytes for p in self._partitions.values()), "its parts' bytes do not add up"
        policies = [p for part in self._partitions.values() for p in (part.policy, *part.tenant_policies.values())]
        num_ordered = sum(len(place.policies) for place in self._entries.values())
        assert num_ordered == sum(map(len, policies)), "the policies do not order the tier's chunks"
