"""How long chunks are kept, as requests asked for what they use and store. The longest that anybody asked for counts;
who asks for nothing asks for as long as there is room.

What a chunk continues is kept as long as the chunk. So of a path the last one's time is the shortest, and nothing goes
with a parent whose time has passed before its own has.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from cache_daemon.durable.expiry_note import NOTE_PREFIX, note_of, until_of
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.tier_manager import Tiers


class Terms:
    """``note`` keeps a small value for the next start; None deletes it."""

    def __init__(self, tiers: Tiers, note: Callable[[bytes, bytes | None], None]) -> None:
        self._tiers, self._note = tiers, note
        self._ending: dict[bytes, Chunk] = {}  # listed chunks that end, by prefix hash
        self._changed: dict[bytes, None] = {}  # since it was last written down
        self._noted: set[bytes] = set()
        tiers.on_listed.append(self._listed)
        tiers.on_unlisted.append(self._unlisted)

    def until(self, ttl_seconds: int) -> float:
        """The end of so many seconds from now, on the store's clock; 0 has none."""
        return self._tiers.clock() + ttl_seconds if ttl_seconds else inf

    def keep(self, chunk: Chunk | None, until: float) -> None:
        """Keeps a chunk, and all that it continues, until then at least."""
        while chunk is not None and chunk.kept_until < until:
            chunk.kept_until = until
            if chunk.listed:
                if until == inf:
                    del self._ending[chunk.key]
                self._changed[chunk.key] = None
            chunk = self._tiers.parent_of(chunk)

    def past(self) -> list[Chunk]:
        """Chunks that are listed and whose time has passed; a pinned one stays, and with it what it continues."""
        now = self._tiers.clock()
        return [chunk for chunk in self._ending.values() if chunk.kept_until < now and not chunk.pins]

    # ---- over restarts --------------------------------------------------------------------------------------

    def write_down(self) -> None:
        """Notes what has changed of chunks that are on disk."""
        for key in list(self._changed):
            chunk = self._ending.get(key)
            if chunk is None:
                self._forget(key)
            elif chunk.on_disk is Residency.PRESENT:
                self._note(NOTE_PREFIX + key, note_of(chunk.kept_until))
                self._noted.add(key)
            else:
                continue  # it may arrive there
            del self._changed[key]

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start, when all chunks are listed."""
        key = name.removeprefix(NOTE_PREFIX)
        chunk, until = self._tiers.index.get(key), until_of(value)
        self._noted.add(key)
        if chunk is None or until is None:
            self._forget(key)
            return
        chunk.kept_until = until
        self._ending[key] = chunk

    def restored(self) -> None:
        """All notes were taken up: a chunk whose note was lost is kept, and so is what it continues."""
        for chunk in list(self._ending.values()):
            for child in self._tiers.index.children(chunk.key):
                self.keep(chunk, child.kept_until)

    def _listed(self, chunk: Chunk) -> None:
        if chunk.kept_until < inf:
            self._ending[chunk.key] = chunk
            self._changed[chunk.key] = None
        self.keep(self._tiers.parent_of(chunk), chunk.kept_until)

    def _unlisted(self, chunk: Chunk) -> None:
        self._ending.pop(chunk.key, None)
        self._changed.pop(chunk.key, None)
        self._forget(chunk.key)

    def _forget(self, key: bytes) -> None:
        if key in self._noted:
            self._noted.discard(key)
            self._note(NOTE_PREFIX + key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books are of listed chunks, and no chunk outlives what it continues."""
        listed = {chunk.key: chunk for chunk in self._tiers.index if chunk.kept_until < inf}
        assert listed == self._ending, "chunks that end do not add up"
        assert all(self._noted_or_changed(chunk) for chunk in listed.values()), "a term that nobody writes down"
        for chunk in self._tiers.index:
            parent = self._tiers.parent_of(chunk)
            assert parent is None or parent.kept_until >= chunk.kept_until, "a chunk outlives what it continues"

    def _noted_or_changed(self, chunk: Chunk) -> bool:
        return chunk.key in self._noted or chunk.key in self._changed
