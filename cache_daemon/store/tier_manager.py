"""Where chunks are: takes them in, moves them out of the arena, drops them, and frees what nobody uses any more.

The one place that changes the index, the arena and the books of both tiers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvsidecar.cache.v1.cache_pb2 import (
    EVENT_TYPE_COMMITTED,
    EVENT_TYPE_DELETED,
    EVENT_TYPE_DEMOTED,
    EVENT_TYPE_EVICTED,
    EVENT_TYPE_PROMOTED,
    EVENT_TYPE_UNPERSISTED,
    EventType,
)

from cache_daemon.durable.group_commit_writer import DurableWriter
from cache_daemon.memory.arena import Arena, Slot, footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.counters import Counters
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.tenant_usage import Accounts, Tenant
from cache_daemon.store.tier_accounting import Shelf

# One allocation pushes out at most so much more than it needs, before it gives up on finding room in one piece.
_MOST_EVICTED = 16
_LEAST_EVICTED_BYTES = 64 << 20


@dataclass(eq=False)
class Tiers:
    """``clock`` is in seconds and survives restarts (it is Unix time that never goes back)."""

    arena: Arena
    index: PrefixIndex
    hot: Shelf
    cold: Shelf | None
    writer: DurableWriter | None
    events: EventLog
    accounts: Accounts
    counts: Counters
    clock: Callable[[], float]
    detached: set[Chunk] = field(default_factory=set)  # not listed, but in use
    on_listed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_unlisted: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_committed: list[Callable[[Chunk], None]] = field(default_factory=list)
    promised: dict[Slot, Tenant] = field(default_factory=dict)  # slots that no chunk has yet
    pinned_here: dict[Chunk, None] = field(default_factory=dict)  # pinned ones that only the arena has
    used: dict[bytes, float] = field(default_factory=dict)  # durable chunks used since that was last written down

    # ---- arrivals -------------------------------------------------------------------------------------------

    def list_chunk(self, chunk: Chunk) -> None:
        """Makes a chunk findable. Its parent is, or it begins a prompt."""
        parent = self.parent_of(chunk)
        self.index.add(chunk)
        chunk.tenant.entries += 1
        if chunk.slot is not None:
            self.promised.pop(chunk.slot, None)
            self.hot.insert(chunk, footprint(chunk.size_bytes), self._resident(parent))
        if self.cold is not None and chunk.on_disk is Residency.PRESENT:
            self.cold.insert(chunk, chunk.stored_bytes, self._durable(parent))
        if parent is not None:
            self.reconsider(parent)
        for told in self.on_listed:
            told(chunk)

    def arrived_in_arena(self, chunk: Chunk, slot: Slot) -> None:
        """The slot holds the chunk's payload."""
        self.promised.pop(slot, None)
        chunk.slot, chunk.in_arena = slot, Residency.PRESENT
        if chunk.listed:
            self.hot.insert(chunk, footprint(chunk.size_bytes), self._resident(self.parent_of(chunk)))
            self.reconsider(chunk)
            self.tell(EVENT_TYPE_PROMOTED, chunk)

    def goes_to_disk(self, chunk: Chunk, most_bytes: int) -> None:
        """The chunk is being written; room for the most that it can take is taken."""
        assert self.cold is not None
        chunk.on_disk = Residency.ARRIVING
        self.cold.insert(chunk, most_bytes, self._durable(self.parent_of(chunk)))
        self.reconsider(chunk)

    def arrived_on_disk(self, chunk: Chunk, stored_bytes: int) -> None:
        """The durable tier has the chunk."""
        assert self.cold is not None
        chunk.on_disk, chunk.stored_bytes = Residency.PRESENT, stored_bytes
        self.cold.resize(chunk, stored_bytes)
        self.reconsider(chunk)

    def not_on_disk(self, chunk: Chunk) -> None:
        """The durable tier did not take the chunk, or has removed it although nobody dropped it."""
        assert self.cold is not None
        chunk.on_disk, chunk.stored_bytes = Residency.ABSENT, 0
        self.cold.remove(chunk)
        self.used.pop(chunk.key, None)
        self.reconsider(chunk)

    def _resident(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and parent in self.hot else None

    def _durable(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and self.cold is not None and parent in self.cold else None

    def parent_of(self, chunk: Chunk) -> Chunk | None:
        return None if chunk.is_first else self.index.get(chunk.parent_key)

    def touch(self, chunk: Chunk) -> None:
        """A chunk was used, at its ``used_at``. Of a path, the last chunk first: parents outlive their children."""
        if not chunk.listed:
            return
        self.hot.touch(chunk)
        if self.cold is not None:
            self.cold.touch(chunk)
        if chunk.on_disk is not Residency.ABSENT:  # one that arrives may have been written with an earlier use
            self.used[chunk.key] = chunk.used_at

    def reconsider(self, chunk: Chunk) -> None:
        """Says to both tiers whether a chunk must stay: pinned ones do, those that an insertion continues, and parents,
        without which what continues them could not be found; but one tier may give up what the other has. Only the
        disk keeps a pinned chunk that both have: the arena is for what is used."""
        needed = chunk.anchors > 0 or self.index.has_children(chunk)
        here = (needed or chunk.pins > 0) and chunk.on_disk is not Residency.PRESENT
        self.hot.keep(chunk, here)
        if self.cold is not None:
            self.cold.keep(chunk, chunk.pins > 0 or (needed and chunk.in_arena is not Residency.PRESENT))
        if chunk.pins > 0 and here:
            self.pinned_here[chunk] = None
        else:
            self.pinned_here.pop(chunk, None)

    # ---- room in the arena ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, tenant: Tenant) -> Slot | None:
        """A slot for a chunk that arrives, evicting as long as it helps. None when all that could go is in use, pinned,
        or not the tenant's. The slot goes to ``list_chunk``, ``arrived_in_arena`` or ``give_back``.
        """
        if size_bytes > self.arena.size_bytes:
            return None
        while self.over_quota(tenant, size_bytes):
            if not self._evict_from_arena(tenant, own=True):
                return None
        evicted = 0
        while (slot := self.arena.allocate(size_bytes)) is None:
            if evicted > max(_MOST_EVICTED * size_bytes, _LEAST_EVICTED_BYTES):
                return None  # there is room, but not in one piece
            gone = self._evict_from_arena(tenant, own=False)
            if not gone:
                return None
            evicted += gone
        self.promised[slot] = tenant
        return slot

    def give_back(self, slot: Slot) -> None:
        """Frees a slot that no chunk came to have."""
        del self.promised[slot]
        self.arena.free(slot)

    def over_quota(self, tenant: Tenant, size_bytes: int) -> bool:
        """Whether a payload more is beyond the tenant's quota of the arena, with those that are being copied."""
        if tenant.limits.arena_bytes is None:
            return False
        promised = sum(footprint(slot.size_bytes) for slot, owner in self.promised.items() if owner is tenant)
        return self.hot.over_quota(tenant, promised + footprint(size_bytes))

    def _evict_from_arena(self, tenant: Tenant, own: bool) -> int:
        """Returns the bytes that became free; 0 when nothing can go."""
        victim = next((c for c in self.hot.victims(tenant, own) if not c.in_use), None)
        if victim is None:
            return 0
        self.counts.arena_evictions += 1
        if victim.on_disk is Residency.PRESENT:
            self._free_slot(victim)
            self.tell(EVENT_TYPE_DEMOTED, victim)
        else:
            self.drop(victim, EVENT_TYPE_EVICTED)
        return victim.size_bytes

    def evict_from_disk(self, victim: Chunk) -> None:
        """Takes a chunk that nothing durable continues out of the durable tier; it stays in the arena if there."""
        assert self.cold is not None
        assert self.writer is not None
        self.counts.durable_evictions += 1
        if victim.in_arena is not Residency.PRESENT:
            self.drop(victim, EVENT_TYPE_EVICTED)
            return
        self.writer.remove([victim.key])
        self.used.pop(victim.key, None)
        self.cold.remove(victim)
        victim.on_disk, victim.stored_bytes = Residency.ABSENT, 0
        self.reconsider(victim)
        self.tell(EVENT_TYPE_UNPERSISTED, victim)

    def make_entry_room(self, tenant: Tenant) -> bool:
        """Drops a tenant's own chunks until it may have one more. False when its others cannot go."""
        most = tenant.limits.entries
        while most is not None and tenant.entries >= most:
            shelves = [s for s in (self.cold, self.hot) if s is not None]
            own = (c for shelf in shelves for c in shelf.victims(tenant, own=True))
            victim = next((c for c in own if self._may_go(c)), None)
            if victim is None:
                return False
            self.drop(victim, EVENT_TYPE_EVICTED)
        return True

    def _may_go(self, chunk: Chunk) -> bool:
        """Whether a chunk may leave both tiers."""
        return not (chunk.in_use or chunk.pins or chunk.anchors or self.index.has_children(chunk))

    # ---- removal --------------------------------------------------------------------------------------------

    def drop(self, chunk: Chunk, why: EventType.ValueType = EVENT_TYPE_DELETED, *, on_disk_too: bool = True) -> int:
        """Removes a chunk and all that continues it. With ``on_disk_too`` False, the durable tier has removed the chunk
        itself already. Returns how many."""
        members = self.index.subtree(chunk) if chunk.listed else []
        for member in reversed(members):
            if member.listed:  # one may take another along
                self.unlist(member, why, on_disk_too=on_disk_too or member is not chunk)
        return len(members)

    def unlist(self, chunk: Chunk, why: EventType.ValueType, *, on_disk_too: bool = True) -> None:
        """Removes a chunk without children."""
        self.index.remove(chunk)
        self.hot.remove(chunk)
        if self.cold is not None:
            self.cold.remove(chunk)
        chunk.tenant.entries -= 1
        chunk.listed = False
        if self.writer is not None and on_disk_too and (chunk.unsure or chunk.on_disk is not Residency.ABSENT):
            self.writer.remove([chunk.key])
        if chunk.on_disk is Residency.PRESENT:
            chunk.on_disk = Residency.ABSENT
        self.used.pop(chunk.key, None)
        self.tell(why, chunk)
        for told in self.on_unlisted:
            told(chunk)
        parent = self.parent_of(chunk)
        if parent is not None:
            self.reconsider(parent)
        if chunk.slot is not None or chunk.in_use:
            self.detached.add(chunk)
        self.unused(chunk)

    def unused(self, chunk: Chunk) -> None:
        """Somebody let go of a chunk's slot: it is free if the chunk is listed no more and nobody else uses it."""
        if not chunk.listed and not chunk.in_use:
            self._free_slot(chunk)
            self.detached.discard(chunk)

    def _free_slot(self, chunk: Chunk) -> None:
        if chunk.slot is not None:
            self.hot.remove(chunk)
            self.arena.free(chunk.slot)
            chunk.slot, chunk.in_arena = None, Residency.ABSENT
            if chunk.listed:
                self.reconsider(chunk)

    def tell(self, kind: EventType.ValueType, chunk: Chunk) -> None:
        self.events.append(kind, chunk.state(self.clock()))
        if kind == EVENT_TYPE_COMMITTED:
            for told in self.on_committed:
                told(chunk)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is accounted for once and every tier agrees with its books."""
        self.arena.check_integrity()
        self.index.check_integrity()
        self.hot.check_integrity()
        chunks = [*self.index, *self.detached]
        assert all(c.slot is not None for c in chunks if c.in_arena is Residency.PRESENT), "a resident without a slot"
        assert all((c in self.hot) == (c.in_arena is Residency.PRESENT) for c in self.index), "the arena's books differ"
        if self.cold is not None:
            self.cold.check_integrity()
            absent = Residency.ABSENT
            assert all((c in self.cold) == (c.on_disk is not absent) for c in self.index), "the disk's books differ"
        assert all(c.listed for c in self.index), "an unlisted chunk in the index"
        assert all(c.in_use for c in self.detached), "a chunk that nobody uses keeps its slot"
        entries: dict[Tenant, int] = {}
        for chunk in self.index:
            entries[chunk.tenant] = entries.get(chunk.tenant, 0) + 1
        assert all(t.entries == n for t, n in entries.items()), "a tenant's entries do not add up"


class Clock:
    """Unix time in seconds that never goes back while the process runs, whatever becomes of the system's clock."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._base + time.monotonic()
