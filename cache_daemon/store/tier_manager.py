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

from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.memory.arena import Arena, Slot, footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.counters import Counters
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.tenant_usage import TenantAccount, TenantAccounts
from cache_daemon.store.tier_accounting import TierLedger

# One allocation pushes out at most so much more than it needs, before it gives up on finding room in one piece.
_MAX_EVICTED_FACTOR = 16
_MIN_EVICTED_BYTES = 64 << 20


@dataclass(eq=False)
class TierManager:
    """``clock`` is in seconds and survives restarts (it is Unix time that never goes back)."""

    arena: Arena
    index: PrefixIndex
    arena_ledger: TierLedger
    disk_ledger: TierLedger | None
    writer: GroupCommitWriter | None
    events: EventLog
    accounts: TenantAccounts
    counters: Counters
    clock: Callable[[], float]
    zombies: set[Chunk] = field(default_factory=set)  # not listed, but in use
    on_indexed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_unindexed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_committed: list[Callable[[Chunk], None]] = field(default_factory=list)
    pending_slots: dict[Slot, TenantAccount] = field(default_factory=dict)  # slots that no chunk has yet
    arena_only_pins: dict[Chunk, None] = field(default_factory=dict)  # pinned ones that only the arena has
    unsaved_recency: dict[bytes, float] = field(
        default_factory=dict
    )  # durable chunks used since that was last written down

    # ---- arrivals -------------------------------------------------------------------------------------------

    def index_chunk(self, chunk: Chunk) -> None:
        """Makes a chunk findable. Its parent is, or it begins a prompt."""
        parent = self.parent_of(chunk)
        self.index.add(chunk)
        chunk.tenant.entries += 1
        if chunk.slot is not None:
            self.pending_slots.pop(chunk.slot, None)
            self.arena_ledger.insert(chunk, footprint(chunk.size_bytes), self._if_in_arena(parent))
        if self.disk_ledger is not None and chunk.disk_state is Residency.PRESENT:
            self.disk_ledger.insert(chunk, chunk.stored_bytes, self._if_on_disk(parent))
        if parent is not None:
            self.update_evictable(parent)
        for told in self.on_indexed:
            told(chunk)

    def finish_load(self, chunk: Chunk, slot: Slot) -> None:
        """The slot holds the chunk's payload."""
        self.pending_slots.pop(slot, None)
        chunk.slot, chunk.arena_state = slot, Residency.PRESENT
        if chunk.indexed:
            self.arena_ledger.insert(chunk, footprint(chunk.size_bytes), self._if_in_arena(self.parent_of(chunk)))
            self.update_evictable(chunk)
            self.emit(EVENT_TYPE_PROMOTED, chunk)

    def begin_write(self, chunk: Chunk, most_bytes: int) -> None:
        """The chunk is being written; room for the most that it can take is taken."""
        assert self.disk_ledger is not None
        chunk.disk_state = Residency.IN_FLIGHT
        self.disk_ledger.insert(chunk, most_bytes, self._if_on_disk(self.parent_of(chunk)))
        self.update_evictable(chunk)

    def finish_write(self, chunk: Chunk, stored_bytes: int) -> None:
        """The durable tier has the chunk."""
        assert self.disk_ledger is not None
        chunk.disk_state, chunk.stored_bytes = Residency.PRESENT, stored_bytes
        self.disk_ledger.resize(chunk, stored_bytes)
        self.update_evictable(chunk)

    def abort_write(self, chunk: Chunk) -> None:
        """The durable tier did not take the chunk, or has removed it although nobody dropped it."""
        assert self.disk_ledger is not None
        chunk.disk_state, chunk.stored_bytes = Residency.ABSENT, 0
        self.disk_ledger.remove(chunk)
        self.unsaved_recency.pop(chunk.key, None)
        self.update_evictable(chunk)

    def _if_in_arena(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and parent in self.arena_ledger else None

    def _if_on_disk(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and self.disk_ledger is not None and parent in self.disk_ledger else None

    def parent_of(self, chunk: Chunk) -> Chunk | None:
        return None if chunk.is_first else self.index.get(chunk.parent_key)

    def touch(self, chunk: Chunk) -> None:
        """A chunk was used, at its ``used_at``. Of a path, the last chunk first: parents outlive their children."""
        if not chunk.indexed:
            return
        self.arena_ledger.touch(chunk)
        if self.disk_ledger is not None:
            self.disk_ledger.touch(chunk)
        if chunk.disk_state is not Residency.ABSENT:  # one that arrives may have been written with an earlier use
            self.unsaved_recency[chunk.key] = chunk.last_used_at

    def update_evictable(self, chunk: Chunk) -> None:
        """Says to both tiers whether a chunk must stay: pinned ones do, those that an insertion continues, and parents,
        without which what continues them could not be found; but one tier may give up what the other has. Only the
        disk keeps a pinned chunk that both have: the arena is for what is used."""
        needed = chunk.anchors > 0 or self.index.has_children(chunk)
        here = (needed or chunk.pins > 0) and chunk.disk_state is not Residency.PRESENT
        self.arena_ledger.set_protected(chunk, here)
        if self.disk_ledger is not None:
            self.disk_ledger.set_protected(
                chunk, chunk.pins > 0 or (needed and chunk.arena_state is not Residency.PRESENT)
            )
        if chunk.pins > 0 and here:
            self.arena_only_pins[chunk] = None
        else:
            self.arena_only_pins.pop(chunk, None)

    # ---- room in the arena ----------------------------------------------------------------------------------

    def allocate(self, size_bytes: int, tenant: TenantAccount) -> Slot | None:
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
            if evicted > max(_MAX_EVICTED_FACTOR * size_bytes, _MIN_EVICTED_BYTES):
                return None  # there is room, but not in one piece
            gone = self._evict_from_arena(tenant, own=False)
            if not gone:
                return None
            evicted += gone
        self.pending_slots[slot] = tenant
        return slot

    def release_slot(self, slot: Slot) -> None:
        """Frees a slot that no chunk came to have."""
        del self.pending_slots[slot]
        self.arena.free(slot)

    def over_quota(self, tenant: TenantAccount, size_bytes: int) -> bool:
        """Whether a payload more is beyond the tenant's quota of the arena, with those that are being copied."""
        if tenant.limits.arena_bytes is None:
            return False
        promised = sum(footprint(slot.size_bytes) for slot, owner in self.pending_slots.items() if owner is tenant)
        return self.arena_ledger.over_quota(tenant, promised + footprint(size_bytes))

    def _evict_from_arena(self, tenant: TenantAccount, own: bool) -> int:
        """Returns the bytes that became free; 0 when nothing can go."""
        victim = next((c for c in self.arena_ledger.victims(tenant, own) if not c.in_use), None)
        if victim is None:
            return 0
        self.counters.arena_evictions += 1
        if victim.disk_state is Residency.PRESENT:
            self._free_slot(victim)
            self.emit(EVENT_TYPE_DEMOTED, victim)
        else:
            self.remove_subtree(victim, EVENT_TYPE_EVICTED)
        return victim.size_bytes

    def evict_from_disk(self, victim: Chunk) -> None:
        """Takes a chunk that nothing durable continues out of the durable tier; it stays in the arena if there."""
        assert self.disk_ledger is not None
        assert self.writer is not None
        self.counters.durable_evictions += 1
        if victim.arena_state is not Residency.PRESENT:
            self.remove_subtree(victim, EVENT_TYPE_EVICTED)
            return
        self.writer.remove([victim.key])
        self.unsaved_recency.pop(victim.key, None)
        self.disk_ledger.remove(victim)
        victim.disk_state, victim.stored_bytes = Residency.ABSENT, 0
        self.update_evictable(victim)
        self.emit(EVENT_TYPE_UNPERSISTED, victim)

    def enforce_entry_quota(self, tenant: TenantAccount) -> bool:
        """Drops a tenant's own chunks until it may have one more. False when its others cannot go."""
        most = tenant.limits.entries
        while most is not None and tenant.entries >= most:
            shelves = [s for s in (self.disk_ledger, self.arena_ledger) if s is not None]
            own = (c for shelf in shelves for c in shelf.victims(tenant, own=True))
            victim = next((c for c in own if self._is_evictable(c)), None)
            if victim is None:
                return False
            self.remove_subtree(victim, EVENT_TYPE_EVICTED)
        return True

    def _is_evictable(self, chunk: Chunk) -> bool:
        """Whether a chunk may leave both tiers."""
        return not (chunk.in_use or chunk.pins or chunk.anchors or self.index.has_children(chunk))

    # ---- removal --------------------------------------------------------------------------------------------

    def remove_subtree(
        self, chunk: Chunk, why: EventType.ValueType = EVENT_TYPE_DELETED, *, on_disk_too: bool = True
    ) -> int:
        """Removes a chunk and all that continues it. With ``on_disk_too`` False, the durable tier has removed the chunk
        itself already. Returns how many."""
        members = self.index.subtree(chunk) if chunk.indexed else []
        for member in reversed(members):
            if member.indexed:  # one may take another along
                self._unindex(member, why, on_disk_too=on_disk_too or member is not chunk)
        return len(members)

    def _unindex(self, chunk: Chunk, why: EventType.ValueType, *, on_disk_too: bool = True) -> None:
        """Removes a chunk without children."""
        self.index.remove(chunk)
        self.arena_ledger.remove(chunk)
        if self.disk_ledger is not None:
            self.disk_ledger.remove(chunk)
        chunk.tenant.entries -= 1
        chunk.indexed = False
        if (
            self.writer is not None
            and on_disk_too
            and (chunk.maybe_on_disk or chunk.disk_state is not Residency.ABSENT)
        ):
            self.writer.remove([chunk.key])
        if chunk.disk_state is Residency.PRESENT:
            chunk.disk_state = Residency.ABSENT
        self.unsaved_recency.pop(chunk.key, None)
        self.emit(why, chunk)
        for told in self.on_unindexed:
            told(chunk)
        parent = self.parent_of(chunk)
        if parent is not None:
            self.update_evictable(parent)
        if chunk.slot is not None or chunk.in_use:
            self.zombies.add(chunk)
        self.on_released(chunk)

    def on_released(self, chunk: Chunk) -> None:
        """Somebody let go of a chunk's slot: it is free if the chunk is listed no more and nobody else uses it."""
        if not chunk.indexed and not chunk.in_use:
            self._free_slot(chunk)
            self.zombies.discard(chunk)

    def _free_slot(self, chunk: Chunk) -> None:
        if chunk.slot is not None:
            self.arena_ledger.remove(chunk)
            self.arena.free(chunk.slot)
            chunk.slot, chunk.arena_state = None, Residency.ABSENT
            if chunk.indexed:
                self.update_evictable(chunk)

    def emit(self, kind: EventType.ValueType, chunk: Chunk) -> None:
        self.events.append(kind, chunk.snapshot(self.clock()))
        if kind == EVENT_TYPE_COMMITTED:
            for told in self.on_committed:
                told(chunk)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is accounted for once and every tier agrees with its books."""
        self.arena.check_integrity()
        self.index.check_integrity()
        self.arena_ledger.check_integrity()
        chunks = [*self.index, *self.zombies]
        assert all(c.slot is not None for c in chunks if c.arena_state is Residency.PRESENT), (
            "a resident without a slot"
        )
        assert all((c in self.arena_ledger) == (c.arena_state is Residency.PRESENT) for c in self.index), (
            "the arena's books differ"
        )
        if self.disk_ledger is not None:
            self.disk_ledger.check_integrity()
            absent = Residency.ABSENT
            assert all((c in self.disk_ledger) == (c.disk_state is not absent) for c in self.index), (
                "the disk's books differ"
            )
        assert all(c.indexed for c in self.index), "an unlisted chunk in the index"
        assert all(c.in_use for c in self.zombies), "a chunk that nobody uses keeps its slot"
        entries: dict[TenantAccount, int] = {}
        for chunk in self.index:
            entries[chunk.tenant] = entries.get(chunk.tenant, 0) + 1
        assert all(t.entries == n for t, n in entries.items()), "a tenant's entries do not add up"


class Clock:
    """Unix time in seconds that never goes back while the process runs, whatever becomes of the system's clock."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._base + time.monotonic()
