"""Tier manager: records where chunks are, moves them between tiers and removes them.

Only this module changes the index, the arena and both tiers' quotas. ``ArenaEvictor``, ``DiskEvictor`` and
``IndexEvictor`` choose the chunks to evict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvsidecar.cache.v1.cache_pb2 import (
    EVENT_TYPE_COMMITTED,
    EVENT_TYPE_DEMOTED,
    EVENT_TYPE_PROMOTED,
    EVENT_TYPE_UNPERSISTED,
    EventType,
    StatsResponse,
)

from cache_daemon.durable.durable_tier import PutOutcome
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.memory.arena import Arena, Slot, footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.counters import Counters
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.loss_cause import LossCause, LostChunk
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.store_clock import StoreClock
from cache_daemon.store.tenant_accounts import TenantAccount, TenantAccounts
from cache_daemon.store.tier_quotas import TierQuotas


@dataclass(frozen=True)
class StoreContext:
    """Objects that all parts of a store share.

    ``clock`` returns Unix seconds that never decrease, even after a restart.
    """

    events: EventLog
    accounts: TenantAccounts
    counters: Counters
    clock: StoreClock


@dataclass(eq=False)
class TierManager:
    """Moves chunks between the tiers and keeps index, quotas and events consistent.

    The ``on_*`` lists hold subscribers.
    """

    arena: Arena
    index: PrefixIndex
    arena_quotas: TierQuotas
    disk_quotas: TierQuotas | None
    writer: GroupCommitWriter | None
    context: StoreContext
    events: EventLog = field(init=False)
    accounts: TenantAccounts = field(init=False)
    counters: Counters = field(init=False)
    clock: StoreClock = field(init=False)
    zombies: set[Chunk] = field(default_factory=set)  # not indexed, but in use
    on_indexed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_unindexed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_committed: list[Callable[[Chunk], None]] = field(default_factory=list)
    on_lost: list[Callable[[LostChunk], None]] = field(default_factory=list)
    on_slot_freed: list[Callable[[Chunk], None]] = field(default_factory=list)
    gpu_quotas: TierQuotas | None = None  # see GpuTier
    pending_slots: dict[Slot, TenantAccount] = field(default_factory=dict)  # slots that have no chunk yet
    arena_only_pins: set[Chunk] = field(default_factory=set)  # pinned or retained, without a durable copy
    arena_only_pins_bytes: int = 0
    # Durable chunks used since recency was last persisted.
    unsaved_recency: dict[bytes, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events, self.accounts = self.context.events, self.context.accounts
        self.counters, self.clock = self.context.counters, self.context.clock

    # ---- states of chunks -----------------------------------------------------------------------------------

    def index_chunk(self, chunk: Chunk) -> None:
        """Add a chunk to the index. Its parent must be indexed, unless the chunk begins a prompt."""
        parent = self.parent_of(chunk)
        self.index.add(chunk)
        chunk.tenant.entries += 1
        if chunk.slot is not None:
            self.pending_slots.pop(chunk.slot, None)
            self.arena_quotas.insert(chunk, footprint(chunk.size_bytes), self._if_in_arena(parent))
        if self.disk_quotas is not None and chunk.disk_state is Residency.PRESENT:
            self.disk_quotas.insert(chunk, chunk.stored_bytes, self._if_on_disk(parent))
        if parent is not None:
            self.update_evictable(parent)
        for notify in self.on_indexed:
            notify(chunk)

    def begin_load(self, chunk: Chunk) -> None:
        """Record that a durable chunk is being read; ``load_future`` resolves at its end."""
        chunk.arena_state, chunk.load_future = Residency.IN_FLIGHT, asyncio.get_running_loop().create_future()

    def end_load(self, chunk: Chunk) -> asyncio.Future[None] | None:
        """Record the end of a read. Returns the future that the caller resolves after recording the result."""
        future, chunk.load_future = chunk.load_future, None
        chunk.arena_state = Residency.ABSENT
        return future

    def finish_load(self, chunk: Chunk, slot: Slot) -> None:
        """Record that a slot holds the chunk's payload."""
        self.pending_slots.pop(slot, None)
        chunk.slot, chunk.arena_state = slot, Residency.PRESENT
        if chunk.indexed:
            self.arena_quotas.insert(chunk, footprint(chunk.size_bytes), self._if_in_arena(self.parent_of(chunk)))
            self.update_evictable(chunk)
            self.emit(EVENT_TYPE_PROMOTED, chunk)

    def begin_write(self, chunk: Chunk, most_bytes: int) -> None:
        """Record that a chunk is being written.

        Until the write ends, ``most_bytes`` count as used: the maximal size of the stored chunk.
        """
        assert self.disk_quotas is not None
        chunk.disk_state = Residency.IN_FLIGHT
        self.disk_quotas.insert(chunk, most_bytes, self._if_on_disk(self.parent_of(chunk)))
        self.update_evictable(chunk)

    def finish_write(self, chunk: Chunk, stored_bytes: int) -> None:
        """Record that the durable tier has the chunk."""
        assert self.disk_quotas is not None
        chunk.disk_state, chunk.stored_bytes = Residency.PRESENT, stored_bytes
        self.disk_quotas.resize(chunk, stored_bytes)
        self.update_evictable(chunk)

    def discard_write(self, chunk: Chunk) -> None:
        """Record the end of a write of a chunk that has left the index meanwhile."""
        chunk.disk_state = Residency.ABSENT

    def abort_write(self, chunk: Chunk) -> None:
        """Record that the durable tier refused or removed the chunk."""
        assert self.disk_quotas is not None
        chunk.disk_state, chunk.stored_bytes = Residency.ABSENT, 0
        self.disk_quotas.remove(chunk)
        self.unsaved_recency.pop(chunk.key, None)
        self.update_evictable(chunk)

    def _if_in_arena(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and parent in self.arena_quotas else None

    def _if_on_disk(self, parent: Chunk | None) -> Chunk | None:
        return parent if parent is not None and self.disk_quotas is not None and parent in self.disk_quotas else None

    def parent_of(self, chunk: Chunk) -> Chunk | None:
        """Return the parent in the index; None for a first chunk."""
        return None if chunk.is_first else self.index.get(chunk.parent_key)

    @staticmethod
    def record_use(chunks: Iterable[Chunk], now: float, *, is_hit: bool) -> None:
        """Record the time of a use, and count hits. A later ``touch`` tells the eviction policies."""
        for chunk in chunks:
            chunk.hits += is_hit
            chunk.last_used_at = now

    def touch(self, chunk: Chunk) -> None:
        """Tell the tiers' eviction policies that a chunk was used."""
        if not chunk.indexed:
            return
        chunk.touched_at = chunk.last_used_at
        self.arena_quotas.touch(chunk)
        if self.disk_quotas is not None:
            self.disk_quotas.touch(chunk)
        if self.gpu_quotas is not None:
            self.gpu_quotas.touch(chunk)
        self.save_recency(chunk)

    def save_recency(self, chunk: Chunk) -> None:
        """Let the durable tier store the time of an indexed chunk's last use."""
        if chunk.disk_state is not Residency.ABSENT:  # also during a write, which may store an earlier use
            self.unsaved_recency[chunk.key] = chunk.last_used_at

    def raise_priority(self, chunk: Chunk) -> None:
        """Give a chunk of low priority its tenant's priority."""
        chunk.low_priority = False
        self.update_partitions(chunk)

    def update_partitions(self, chunk: Chunk) -> None:
        """Move a chunk to the partitions that its priority and its tenant's limits name, in all tiers."""
        for quotas in (self.arena_quotas, self.disk_quotas, self.gpu_quotas):
            if quotas is not None:
                quotas.move(chunk)

    def update_evictable(self, chunk: Chunk) -> None:
        """Recompute in both tiers whether a chunk may be evicted.

        Pinned and retained chunks, parents of an insertion, and parents of indexed chunks must stay in the store. If
        such a chunk is in both tiers, one tier may still evict it. A pinned or retained chunk in both tiers is
        protected on disk only, since the arena is for chunks in use.
        """
        needed = chunk.anchors > 0 or self.index.has_children(chunk)
        protected = (needed or chunk.is_spared) and chunk.disk_state is not Residency.PRESENT
        self.arena_quotas.set_protected(chunk, protected)
        if self.disk_quotas is not None:
            self.disk_quotas.set_protected(
                chunk, chunk.is_spared or (needed and chunk.arena_state is not Residency.PRESENT)
            )
        is_arena_only = chunk.is_spared and protected
        if is_arena_only is not (chunk in self.arena_only_pins):
            self.arena_only_pins ^= {chunk}
            self.arena_only_pins_bytes += footprint(chunk.size_bytes) * (1 if is_arena_only else -1)

    # ---- slots and removal from one tier --------------------------------------------------------------------

    def take_slot(self, size_bytes: int, tenant: TenantAccount) -> Slot | None:
        """Take a free arena slot for a new payload; None if no range is large enough.

        The caller passes the slot to ``index_chunk``, ``finish_load`` or ``release_slot``.
        """
        slot = self.arena.allocate(size_bytes)
        if slot is not None:
            self.pending_slots[slot] = tenant
        return slot

    def release_slot(self, slot: Slot) -> None:
        """Free a slot without a chunk."""
        del self.pending_slots[slot]
        self.arena.free(slot)

    def evict_from_arena(self, victim: Chunk, cause: LossCause) -> None:
        """Evict a chunk from the arena: demote a durable chunk; remove any other chunk with its subtree."""
        self.counters.arena_evictions += 1
        if victim.disk_state is Residency.PRESENT:
            self._free_slot(victim)
            self.emit(EVENT_TYPE_DEMOTED, victim)
        else:
            self.remove_subtree(victim, cause)

    def evict_from_disk(self, victim: Chunk, cause: LossCause = LossCause.DISK_FULL) -> None:
        """Evict a chunk without durable children from the durable tier.

        If the chunk is also in the arena, it stays there.
        """
        assert self.disk_quotas is not None
        assert self.writer is not None
        self.counters.durable_evictions += 1
        if victim.arena_state is not Residency.PRESENT:
            self.remove_subtree(victim, cause)
            return
        self.writer.remove([victim.key])
        self.unsaved_recency.pop(victim.key, None)
        self.disk_quotas.remove(victim)
        victim.disk_state, victim.stored_bytes = Residency.ABSENT, 0
        self.update_evictable(victim)
        self.emit(EVENT_TYPE_UNPERSISTED, victim)

    # ---- removal --------------------------------------------------------------------------------------------

    def remove_subtree(self, chunk: Chunk, cause: LossCause, *, on_disk_too: bool = True) -> int:
        """Remove a chunk and its descendants. Returns their number.

        ``on_disk_too`` False says that the durable tier has already removed the chunk itself.
        """
        members = self.index.subtree(chunk) if chunk.indexed else []
        for member in reversed(members):
            if member.indexed:  # the removal of another member may have removed it
                self._unindex(member, cause, on_disk_too=on_disk_too or member is not chunk)
        return len(members)

    def _unindex(self, chunk: Chunk, cause: LossCause, *, on_disk_too: bool = True) -> None:
        """Remove a chunk without children."""
        self.index.remove(chunk)
        self.arena_quotas.remove(chunk)
        for quotas in (self.disk_quotas, self.gpu_quotas):
            if quotas is not None:
                quotas.remove(chunk)
        chunk.tenant.entries -= 1
        chunk.indexed = False
        if (
            self.writer is not None
            and on_disk_too
            and (chunk.write_state.maybe_on_disk or chunk.disk_state is not Residency.ABSENT)
        ):
            self.writer.remove([chunk.key])
        if chunk.disk_state is Residency.PRESENT:
            chunk.disk_state = Residency.ABSENT
        self.unsaved_recency.pop(chunk.key, None)
        self.emit(cause.event, chunk)
        for notify in self.on_unindexed:
            notify(chunk)
        self.record_loss(LostChunk(chunk.tenant, chunk.parent_key, chunk.start_position, chunk.ids, cause))
        parent = self.parent_of(chunk)
        if parent is not None:
            self.update_evictable(parent)
        if chunk.slot is not None or chunk.in_use:
            self.zombies.add(chunk)
        self.on_released(chunk)

    def record_loss(self, lost: LostChunk) -> None:
        """Tell the subscribers about a removed or refused chunk."""
        if lost.cause is not LossCause.SUPERSEDED:
            for notify in self.on_lost:
                notify(lost)

    def on_released(self, chunk: Chunk) -> None:
        """Free a released chunk's slot if it has no other user and is not indexed."""
        if not chunk.indexed and not chunk.in_use:
            self._free_slot(chunk)
            self.zombies.discard(chunk)

    def _free_slot(self, chunk: Chunk) -> None:
        if chunk.slot is not None:
            self.arena_quotas.remove(chunk)
            self.arena.free(chunk.slot)
            chunk.slot, chunk.arena_state = None, Residency.ABSENT
            for notify in self.on_slot_freed:
                notify(chunk)
            if chunk.indexed:
                self.update_evictable(chunk)

    def write_note(self, key: bytes, value: bytes | None) -> None:
        """Persist a small record for the next start; None deletes it.

        Does nothing without a durable tier.
        """
        if self.writer is not None:
            self.writer.note(key, value)

    async def await_notes(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all notes are on disk. Returns whether they are."""
        if self.writer is None:
            return True
        written: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()
        self.writer.flush(lambda result: None if written.done() else written.set_result(result.outcome))
        await asyncio.wait({written}, timeout=seconds)
        return written.done() and written.result() is PutOutcome.STORED

    def emit(self, kind: EventType.ValueType, chunk: Chunk) -> None:
        """Append an event with the chunk's state."""
        self.events.append(kind, chunk.snapshot(self.clock()))
        if kind == EVENT_TYPE_COMMITTED:
            for notify in self.on_committed:
                notify(chunk)

    def write_to(self, out: StatsResponse) -> None:
        """Fill the index's and the arena's fields of a StatsResponse."""
        out.chunks, out.tokens = len(self.index), self.index.tokens
        out.arena_bytes, out.arena_used_bytes = self.arena.size_bytes, self.arena.used_bytes
        out.arena_chunks = len(self.arena_quotas)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, quotas and entries add up."""
        self.arena.check_integrity()
        self.index.check_integrity()
        self.arena_quotas.check_integrity()
        chunks = [*self.index, *self.zombies]
        slots = [*(c.slot for c in chunks if c.slot is not None), *self.pending_slots]
        pages = sum(footprint(slot.size_bytes) for slot in slots)
        assert pages == self.arena.used_bytes, f"slots hold {pages} bytes, the arena {self.arena.used_bytes}"
        assert all(c.slot is not None for c in chunks if c.arena_state is Residency.PRESENT), (
            "a resident without a slot"
        )
        assert all((c in self.arena_quotas) == (c.arena_state is Residency.PRESENT) for c in self.index), (
            "the arena's books differ"
        )
        if self.disk_quotas is not None:
            self.disk_quotas.check_integrity()
            absent = Residency.ABSENT
            assert all((c in self.disk_quotas) == (c.disk_state is not absent) for c in self.index), (
                "the disk's books differ"
            )
        assert all(c.indexed for c in self.index), "an unlisted chunk in the index"
        assert all(c.in_use for c in self.zombies), "a chunk that nobody uses keeps its slot"
        entries: dict[TenantAccount, int] = {}
        for chunk in self.index:
            entries[chunk.tenant] = entries.get(chunk.tenant, 0) + 1
        assert all(t.entries == n for t, n in entries.items()), "a tenant's entries do not add up"
