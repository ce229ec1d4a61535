"""Retained chunks: eviction spares them until a deadline that requests set.

A retention promises a minimal lifetime; its end does not remove the chunk. Retained chunks count against the quota for
pins, and a new pin suspends retentions that no longer fit beside it. They use at most half of a tenant's other quotas,
so that the tenant can always store new chunks. Retained chunks that are not durable use at most a quarter of the arena,
so that pins find capacity. While these limits do not allow the retention of a chunk, it may be evicted like any other
chunk.

The durable tier gets the deadline of a retained chunk in the same transaction as the chunk, or in the next one. The
written deadline is later than the promised deadline by a quarter of the remaining time. So most uses need no write, and
a retention never ends early, even after a restart.
"""

from __future__ import annotations

from itertools import islice

from sortedcontainers import SortedList

from cache_daemon.durable.record_format import decode_expiry, encode_expiry
from cache_daemon.memory.arena import footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.pins import Pins
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.ttl import TtlIndex
from cache_daemon.store.yield_timer import YieldTimer

NOTE_PREFIX = b"retained-until:"
_QUOTA_SHARE, _ARENA_SHARE = 0.5, 0.25
# A written deadline is later than the promised deadline by this part of the remaining time.
_WRITTEN_MARGIN = 0.25
# Maximal number of chunks beyond the limits that one ``end_due`` tries to retain.
_MAX_RETRIES = 256


class RetainedChunks:
    """Retentions of one store's chunks. Runs on the event loop."""

    def __init__(self, tiers: TierManager, pins: Pins) -> None:
        self._tiers, self._pins = tiers, pins
        self._wanted: dict[Chunk, float] = {}  # indexed chunks with a deadline, and the time of their next check
        self._due: SortedList[tuple[float, bytes]] = SortedList()  # times of the next checks, with the prefix hash
        self._unfit: dict[Chunk, None] = {}  # wanted chunks that are not retained; the next to retry first
        self._written: dict[Chunk, float] = {}  # deadlines in the durable tier
        self.retained_bytes = 0
        tiers.on_indexed.append(self._on_indexed)
        tiers.on_unindexed.append(self._end)
        pins.on_added.append(self._yield_to_pins)

    def extend(self, chunk: Chunk, until: float) -> None:
        """Retain a chunk at least until the time ``until``, as far as quotas allow."""
        if until > max(chunk.retained_until, self._tiers.clock()):
            chunk.retained_until = until
            if chunk.indexed:
                self._on_indexed(chunk)

    async def end_due(self) -> None:
        """End retentions whose deadline has passed, and begin retentions that the limits allow now.

        A chunk keeps the time of its next check when its retention is extended; the check then schedules the next one.
        """
        now, yield_timer = self._tiers.clock(), YieldTimer()
        while self._due and self._due[0][0] <= now:
            chunk = self._tiers.index.get(self._due[0][1])
            assert chunk is not None, "a chunk that leaves the index leaves the schedule"
            if chunk.retained_until <= now:
                self._end(chunk)
            else:
                self._unschedule(chunk)
                self._schedule(chunk)
            await yield_timer.maybe_yield()
        for chunk in list(islice(self._unfit, _MAX_RETRIES)):
            del self._unfit[chunk]
            self._retain(chunk)

    def _on_indexed(self, chunk: Chunk) -> None:
        if chunk.retained_until:
            if chunk not in self._wanted:
                self._schedule(chunk)
            self._retain(chunk)

    def _schedule(self, chunk: Chunk) -> None:
        self._wanted[chunk] = chunk.retained_until
        self._due.add((chunk.retained_until, chunk.key))

    def _unschedule(self, chunk: Chunk) -> bool:
        """Return False if the chunk was not scheduled."""
        at = self._wanted.pop(chunk, None)
        if at is not None:
            self._due.remove((at, chunk.key))
        return at is not None

    def restore(self, name: bytes, value: bytes) -> None:
        """Read a deadline of an earlier start, once all chunks are indexed; ``finish_restore`` applies it."""
        chunk, until = self._tiers.index.get(name.removeprefix(NOTE_PREFIX)), decode_expiry(value)
        if chunk is None or until is None or until <= self._tiers.clock():
            self._tiers.write_note(name, None)
        else:
            self._written[chunk] = until

    def finish_restore(self, ttl: TtlIndex) -> None:
        """Retain the chunks of an earlier start, parents first, once TTLs and pins are restored."""
        for chunk, until in sorted(self._written.items(), key=lambda item: item[0].start_position):
            ttl.extend(chunk, until)
            self.extend(chunk, until)

    def _retain(self, chunk: Chunk) -> None:
        if not chunk.is_retained and self._fits(chunk):
            self._set(chunk, True)
        if chunk.is_retained:
            self._unfit.pop(chunk, None)
        else:
            self._unfit[chunk] = None
        if chunk.is_retained and self._written.get(chunk, 0.0) < chunk.retained_until:
            until = chunk.retained_until + _WRITTEN_MARGIN * max(0.0, chunk.retained_until - self._tiers.clock())
            self._written[chunk] = until
            self._tiers.write_note(NOTE_PREFIX + chunk.key, encode_expiry(until))

    def _yield_to_pins(self, tenant: TenantAccount) -> None:
        """Suspend retentions while they and the pins exceed a limit: those that end soon first, children first."""
        suspended: list[Chunk] = []
        for _, key in self._due:
            if not self._exceeds_with_pins(tenant):
                break
            top = self._tiers.index.get(key)
            assert top is not None, "a chunk that leaves the index leaves the schedule"
            if top.is_retained and self._exceeds_with_pins(top.tenant):
                for chunk in reversed(self._tiers.index.subtree(top)):
                    if chunk.is_retained and self._exceeds_with_pins(chunk.tenant):
                        self._set(chunk, False)
                        self._erase(chunk)
                        suspended.append(chunk)
        self._unfit.update(dict.fromkeys(reversed(suspended)))  # parents are retried first

    def _end(self, chunk: Chunk) -> None:
        if self._unschedule(chunk):
            self._unfit.pop(chunk, None)
            chunk.retained_until = 0.0
            if chunk.is_retained:
                self._set(chunk, False)
        self._erase(chunk)

    def _erase(self, chunk: Chunk) -> None:
        if self._written.pop(chunk, None) is not None:
            self._tiers.write_note(NOTE_PREFIX + chunk.key, None)

    def _set(self, chunk: Chunk, is_retained: bool) -> None:
        chunk.is_retained = is_retained
        sign = 1 if is_retained else -1
        self.retained_bytes += sign * chunk.size_bytes
        chunk.tenant.retained_bytes += sign * chunk.size_bytes
        chunk.tenant.retained_chunks += sign
        self._tiers.update_evictable(chunk)

    def _fits(self, chunk: Chunk) -> bool:
        tenant, added = chunk.tenant, chunk.size_bytes
        if self._exceeds_with_pins(tenant, added):
            return False
        for quota in (tenant.limits.arena_bytes, tenant.limits.store_bytes):
            if quota is not None and tenant.retained_bytes + added > quota * _QUOTA_SHARE:
                return False
        entries = tenant.limits.entries
        if entries is not None and tenant.retained_chunks >= entries * _QUOTA_SHARE:
            return False
        # Without a durable copy, a retained chunk cannot leave the arena.
        arena_bytes = self._tiers.arena.size_bytes * _ARENA_SHARE
        return (
            chunk.disk_state is Residency.PRESENT or self._tiers.arena_only_pins_bytes + footprint(added) <= arena_bytes
        )

    def _exceeds_with_pins(self, tenant: TenantAccount, added: int = 0) -> bool:
        """Return True if pins, retentions and ``added`` bytes exceed the store's limit or the tenant's quota."""
        limits = (
            (self._pins.budget_bytes, self._pins.pinned_bytes + self.retained_bytes),
            (tenant.limits.pin_bytes, tenant.pinned_bytes + tenant.retained_bytes),
        )
        return any(limit is not None and used + added > limit for limit, used in limits)

    def check_integrity(self) -> None:
        """Raise AssertionError unless sums and chunks add up."""
        wanted = {chunk.key for chunk in self._tiers.index if chunk.retained_until}
        assert wanted == {chunk.key for chunk in self._wanted}, "retained chunks differ from the index"
        retained = [chunk for chunk in self._wanted if chunk.is_retained]
        assert self._unfit.keys() == self._wanted.keys() - set(retained), "the chunks to retry differ"
        assert list(self._due) == sorted((at, c.key) for c, at in self._wanted.items()), "the schedule differs"
        assert all(at <= chunk.retained_until for chunk, at in self._wanted.items()), "a retention ends too late"
        assert self._written.keys() <= self._wanted.keys(), "a deadline on disk of a chunk that is not retained"
        late = [chunk for chunk in retained if self._written.get(chunk, 0.0) < chunk.retained_until]
        assert not late, "a deadline that is not on disk"
        assert self.retained_bytes == sum(chunk.size_bytes for chunk in retained), "retained bytes do not add up"
        accounts: dict[TenantAccount, int] = {}
        for chunk in retained:
            accounts[chunk.tenant] = accounts.get(chunk.tenant, 0) + chunk.size_bytes
        assert all(tenant.retained_bytes == size for tenant, size in accounts.items()), "a tenant's bytes differ"
