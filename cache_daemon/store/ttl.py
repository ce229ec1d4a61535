"""Chunk expiry: the TTL index.

A request may set a TTL on the chunks that it uses or stores. The longest TTL wins; a request without a TTL removes the
expiry. A parent never expires before its children, because removing the parent would remove the children before their
own expiry. Independently of all this, a chunk expires when the tenant's TTL has passed since its last use.

Chunks are scheduled by deadline, so a sweep visits due chunks only. Every use may postpone a deadline. A chunk
nevertheless keeps its scheduled time; when that has passed, the chunk is scheduled again if it has not expired.
"""

from __future__ import annotations

from math import inf

from sortedcontainers import SortedList

from cache_daemon.durable.record_format import EXPIRY_NOTE_PREFIX, decode_expiry, encode_expiry
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.tier_manager import TierManager

# Delay until a pinned chunk whose deadline has passed is checked again.
_PINNED_SECONDS = 10.0


class TtlIndex:
    """Expiry times of indexed chunks, persisted over restarts. Runs on the event loop."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._expiring: dict[bytes, Chunk] = {}  # indexed chunks with an expiry, by prefix hash
        self._changed: dict[bytes, None] = {}  # keys with changes since the last persist_changes
        self._persisted: set[bytes] = set()
        self._due: SortedList[tuple[float, bytes]] = SortedList()  # scheduled times, with the prefix hash
        self._scheduled: dict[bytes, float] = {}
        self._num_reloads = tiers.accounts.num_reloads
        tiers.on_indexed.append(self._on_indexed)
        tiers.on_unindexed.append(self._on_unindexed)

    def deadline_of(self, ttl_seconds: int) -> float:
        """Return the time at which a TTL that begins now ends, on the store's clock; a TTL of 0 never ends."""
        return self._tiers.clock() + ttl_seconds if ttl_seconds else inf

    def extend(self, chunk: Chunk | None, deadline: float) -> None:
        """Extend the expiry of a chunk and its ancestors to at least ``deadline``."""
        while chunk is not None and chunk.expires_at < deadline:
            chunk.expires_at = deadline
            if chunk.indexed:
                if deadline == inf:
                    del self._expiring[chunk.key]
                self._changed[chunk.key] = None
            chunk = self._tiers.parent_of(chunk)

    # ---- schedule -------------------------------------------------------------------------------------------

    def schedule(self, chunk: Chunk, earliest: float = -inf) -> None:
        """Schedule an indexed chunk for its deadline or, if that is later, for ``earliest``.

        A chunk that is already scheduled earlier keeps its time.
        """
        at = max(chunk.deadline, earliest)
        if at < self._scheduled.get(chunk.key, inf):
            self._unschedule(chunk.key)
            self._scheduled[chunk.key] = at
            self._due.add((at, chunk.key))

    def next_due(self, now: float) -> Chunk | None:
        """Take the next chunk whose scheduled time has passed.

        If the chunk was used or pinned after it was scheduled, it has not expired; then it is scheduled again.
        """
        if not self._due or self._due[0][0] >= now:
            return None
        key = self._due[0][1]
        self._unschedule(key)
        chunk = self._tiers.index.get(key)
        assert chunk is not None, "a chunk that leaves the index leaves the schedule"
        if not chunk.is_expired(now):
            self.schedule(chunk, now + _PINNED_SECONDS if chunk.pins else now)
        return chunk

    def limits_changed(self) -> bool:
        """Return True once after a reload of tenants' limits; then all chunks must be scheduled again."""
        before, self._num_reloads = self._num_reloads, self._tiers.accounts.num_reloads
        return before != self._num_reloads

    def _unschedule(self, key: bytes) -> None:
        at = self._scheduled.pop(key, None)
        if at is not None:
            self._due.remove((at, key))

    # ---- over restarts --------------------------------------------------------------------------------------

    def persist_changes(self) -> None:
        """Write the notes of changed chunks that are on disk."""
        for key in list(self._changed):
            chunk = self._expiring.get(key)
            if chunk is None:
                self._forget(key)
            elif chunk.disk_state is Residency.PRESENT:
                self._tiers.write_note(EXPIRY_NOTE_PREFIX + key, encode_expiry(chunk.expires_at))
                self._persisted.add(key)
            else:
                continue  # it may become durable later
            del self._changed[key]

    def restore(self, name: bytes, value: bytes) -> None:
        """Restore a note of an earlier start, once all chunks are indexed."""
        key = name.removeprefix(EXPIRY_NOTE_PREFIX)
        chunk, expires_at = self._tiers.index.get(key), decode_expiry(value)
        self._persisted.add(key)
        if chunk is None or expires_at is None:
            self._forget(key)
            return
        chunk.expires_at = expires_at
        self._expiring[key] = chunk
        self.schedule(chunk)

    def finish_restore(self) -> None:
        """Repair lost notes: a chunk without a note, and its ancestors, never expire."""
        for chunk in list(self._expiring.values()):
            for child in self._tiers.index.children(chunk.key):
                self.extend(chunk, child.expires_at)

    def _on_indexed(self, chunk: Chunk) -> None:
        if chunk.expires_at < inf:
            self._expiring[chunk.key] = chunk
            self._changed[chunk.key] = None
        self.schedule(chunk)
        self.extend(self._tiers.parent_of(chunk), chunk.expires_at)

    def _on_unindexed(self, chunk: Chunk) -> None:
        self._expiring.pop(chunk.key, None)
        self._changed.pop(chunk.key, None)
        self._unschedule(chunk.key)
        self._forget(chunk.key)

    def _forget(self, key: bytes) -> None:
        if key in self._persisted:
            self._persisted.discard(key)
            self._tiers.write_note(EXPIRY_NOTE_PREFIX + key, None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index matches the chunks and no child outlives its parent."""
        listed = {chunk.key: chunk for chunk in self._tiers.index if chunk.expires_at < inf}
        assert listed == self._expiring, "chunks that end do not add up"
        assert all(self._is_persisted_or_changed(chunk) for chunk in listed.values()), "a term that nobody writes down"
        assert list(self._due) == sorted((at, key) for key, at in self._scheduled.items()), "the schedule differs"
        reloaded = self._tiers.accounts.num_reloads != self._num_reloads
        for chunk in self._tiers.index:
            latest = max(chunk.deadline, self._tiers.clock() + _PINNED_SECONDS)
            assert reloaded or chunk.deadline == inf or self._scheduled[chunk.key] <= latest, "a chunk is due too late"
            parent = self._tiers.parent_of(chunk)
            assert parent is None or parent.expires_at >= chunk.expires_at, "a chunk outlives what it continues"

    def _is_persisted_or_changed(self, chunk: Chunk) -> bool:
        return chunk.key in self._persisted or chunk.key in self._changed
