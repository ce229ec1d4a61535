"""How long chunks are kept, as requests asked for what they use and store. The longest that anybody asked for counts;
who asks for nothing asks for as long as there is room.

What a chunk continues is kept as long as the chunk. So of a path the last one's time is the shortest, and nothing goes
with a parent whose time has passed before its own has.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from cache_daemon.durable.expiry_note import EXPIRY_NOTE_PREFIX, decode_expiry, encode_expiry
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.tier_manager import TierManager


class TtlIndex:
    """``note`` keeps a small value for the next start; None deletes it."""

    def __init__(self, tiers: TierManager, write_note: Callable[[bytes, bytes | None], None]) -> None:
        self._tiers, self._write_note = tiers, write_note
        self._expiring: dict[bytes, Chunk] = {}  # listed chunks that end, by prefix hash
        self._changed: dict[bytes, None] = {}  # since it was last written down
        self._persisted: set[bytes] = set()
        tiers.on_indexed.append(self._on_indexed)
        tiers.on_unindexed.append(self._on_unindexed)

    def deadline_of(self, ttl_seconds: int) -> float:
        """The end of so many seconds from now, on the store's clock; 0 has none."""
        return self._tiers.clock() + ttl_seconds if ttl_seconds else inf

    def extend(self, chunk: Chunk | None, deadline: float) -> None:
        """Keeps a chunk, and all that it continues, until then at least."""
        while chunk is not None and chunk.expires_at < deadline:
            chunk.expires_at = deadline
            if chunk.indexed:
                if deadline == inf:
                    del self._expiring[chunk.key]
                self._changed[chunk.key] = None
            chunk = self._tiers.parent_of(chunk)

    def expired(self) -> list[Chunk]:
        """Chunks that are listed and whose time has passed; a pinned one stays, and with it what it continues."""
        now = self._tiers.clock()
        return [chunk for chunk in self._expiring.values() if chunk.expires_at < now and not chunk.pins]

    # ---- over restarts --------------------------------------------------------------------------------------

    def persist_changes(self) -> None:
        """Notes what has changed of chunks that are on disk."""
        for key in list(self._changed):
            chunk = self._expiring.get(key)
            if chunk is None:
                self._forget(key)
            elif chunk.disk_state is Residency.PRESENT:
                self._write_note(EXPIRY_NOTE_PREFIX + key, encode_expiry(chunk.expires_at))
                self._persisted.add(key)
            else:
                continue  # it may arrive there
            del self._changed[key]

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start, when all chunks are listed."""
        key = name.removeprefix(EXPIRY_NOTE_PREFIX)
        chunk, until = self._tiers.index.get(key), decode_expiry(value)
        self._persisted.add(key)
        if chunk is None or until is None:
            self._forget(key)
            return
        chunk.expires_at = until
        self._expiring[key] = chunk

    def finish_restore(self) -> None:
        """All notes were taken up: a chunk whose note was lost is kept, and so is what it continues."""
        for chunk in list(self._expiring.values()):
            for child in self._tiers.index.children(chunk.key):
                self.extend(chunk, child.expires_at)

    def _on_indexed(self, chunk: Chunk) -> None:
        if chunk.expires_at < inf:
            self._expiring[chunk.key] = chunk
            self._changed[chunk.key] = None
        self.extend(self._tiers.parent_of(chunk), chunk.expires_at)

    def _on_unindexed(self, chunk: Chunk) -> None:
        self._expiring.pop(chunk.key, None)
        self._changed.pop(chunk.key, None)
        self._forget(chunk.key)

    def _forget(self, key: bytes) -> None:
        if key in self._persisted:
            self._persisted.discard(key)
            self._write_note(EXPIRY_NOTE_PREFIX + key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books are of listed chunks, and no chunk outlives what it continues."""
        listed = {chunk.key: chunk for chunk in self._tiers.index if chunk.expires_at < inf}
        assert listed == self._expiring, "chunks that end do not add up"
        assert all(self._is_persisted_or_changed(chunk) for chunk in listed.values()), "a term that nobody writes down"
        for chunk in self._tiers.index:
            parent = self._tiers.parent_of(chunk)
            assert parent is None or parent.expires_at >= chunk.expires_at, "a chunk outlives what it continues"

    def _is_persisted_or_changed(self, chunk: Chunk) -> bool:
        return chunk.key in self._persisted or chunk.key in self._changed
