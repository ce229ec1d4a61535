"""Pins: counted exemptions from eviction that survive restarts and supersession."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ChunkNotFound, QuotaExceeded
from kvsidecar.keys import HASH_BYTES

from cache_daemon.memory.arena import footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.tier_manager import TierManager

NOTE_PREFIX = b"pin:"
_COUNT = struct.Struct("<I")
_MAX_PINS = 10_000
_ARENA_SHARE = 0.5


@dataclass(eq=False, slots=True)
class _Pin:
    requested_key: bytes  # the prefix hash that was pinned
    chunk: Chunk  # the chunk that now has the pin: a longer one may have superseded the original
    count: int


class Pins:
    """Pinned prefixes of one store. A pin counts for a chunk and all its ancestors."""

    def __init__(self, tiers: TierManager, budget_bytes: int) -> None:
        """Create the table; ``budget_bytes`` limits all pinned chunks.

        Pins of chunks that are not durable are limited to half of the arena.
        """
        self._tiers, self.budget_bytes = tiers, budget_bytes
        self._pins: dict[tuple[bytes, bytes], _Pin] = {}
        self._pins_of: dict[Chunk, list[_Pin]] = {}
        self.pinned_bytes = 0
        tiers.on_unindexed.append(self._on_unindexed)

    def add(self, chunk: Chunk) -> int:
        """Pin a chunk and its ancestors once more. Returns their number. Raises QuotaExceeded."""
        path = self._tiers.index.path(chunk)
        if len(self._pins) >= _MAX_PINS:
            raise QuotaExceeded(f"there are {_MAX_PINS} pins already: unpin something first")
        self._check_budget(chunk, sum(c.size_bytes for c in path if not c.pins))
        self._check_arena([c for c in path if not c.pins and c.disk_state is not Residency.PRESENT])
        pin = self._pins.get((chunk.root, chunk.key))
        if pin is None:
            pin = self._add_pin(chunk.key, chunk, 0)
        pin.count += 1
        self._add_to_path(chunk, 1)
        self._persist(pin)
        return len(path)

    def remove(self, root: bytes, prefix_hash: bytes) -> int:
        """End one pin, named by the pinned hash or its successor's.

        Returns the number of chunks of the prefix. Raises ChunkNotFound.
        """
        pin = self._pins.get((root, prefix_hash))
        if pin is None:
            chunk = self._tiers.index.get(prefix_hash)
            pin = next(iter(self._pins_of.get(chunk, ())), None) if chunk is not None and chunk.root == root else None
        if pin is None:
            raise ChunkNotFound(f"no pin on {prefix_hash.hex()} in this namespace and tenant")
        pin.count -= 1
        self._add_to_path(pin.chunk, -1)
        chunks = len(self._tiers.index.path(pin.chunk))
        if not pin.count:
            self._remove_pin(pin)
        self._persist(pin)
        return chunks

    def transfer(self, old: Chunk, new: Chunk) -> bool:
        """Move the pins of a chunk to the longer sibling that supersedes it.

        Returns False when the pin budget does not suffice; the chunk must then not be superseded.
        """
        if old in self._pins_of and not new.pins:
            try:
                self._check_budget(new, new.size_bytes - old.size_bytes)
            except QuotaExceeded:
                return False
        for pin in self._pins_of.pop(old, []):
            self._add_to_path(old, -pin.count)
            pin.chunk = new
            self._pins_of.setdefault(new, []).append(pin)
            self._add_to_path(new, pin.count)
            self._persist(pin)
        return True

    def restore(self, name: bytes, value: bytes) -> None:
        """Restore a pin of an earlier start; a pin without its chunk ends."""
        root, asked = name[len(NOTE_PREFIX) :][:HASH_BYTES], name[len(NOTE_PREFIX) + HASH_BYTES :]
        if len(value) == _COUNT.size + HASH_BYTES:
            count, current = _COUNT.unpack_from(value)[0], value[_COUNT.size :]
            chunk = self._tiers.index.get(current) or self._tiers.index.get(asked)
            if chunk is not None and chunk.root == root and count:
                self._add_pin(asked, chunk, count)
                self._add_to_path(chunk, count)
                return
        self._tiers.write_note(name, None)

    # ---- helpers --------------------------------------------------------------------------------------------

    def _check_budget(self, chunk: Chunk, added: int) -> None:
        tenant = chunk.tenant
        for limit, used in ((self.budget_bytes, self.pinned_bytes), (tenant.limits.pin_bytes, tenant.pinned_bytes)):
            if limit is not None and used + added > limit:
                raise QuotaExceeded(
                    f"the prefix has {format_size(added)} more to pin; {format_size(used)} of {format_size(limit)} are "
                    "pinned already: unpin something first"
                )

    def _check_arena(self, added: Sequence[Chunk]) -> None:
        """Check the arena share of pinned chunks without a durable copy: they cannot be demoted."""
        size, most = sum(footprint(c.size_bytes) for c in added), int(self._tiers.arena.size_bytes * _ARENA_SHARE)
        used = self._tiers.arena_only_pins_bytes
        if size and used + size > most:
            raise QuotaExceeded(
                f"{format_size(size)} of the prefix are not durable; {format_size(used)} of {format_size(most)} are "
                "pinned in the arena already: try again when it is durable, or unpin something first"
            )

    def _add_pin(self, asked: bytes, chunk: Chunk, count: int) -> _Pin:
        pin = self._pins[chunk.root, asked] = _Pin(asked, chunk, count)
        self._pins_of.setdefault(chunk, []).append(pin)
        return pin

    def _remove_pin(self, pin: _Pin) -> None:
        self._pins.pop((pin.chunk.root, pin.requested_key), None)
        others = [p for p in self._pins_of.pop(pin.chunk, []) if p is not pin]
        if others:
            self._pins_of[pin.chunk] = others

    def _add_to_path(self, chunk: Chunk, by: int) -> None:
        """Add to the pin count of a chunk and its ancestors."""
        for member in self._tiers.index.path(chunk):
            before, member.pins = member.pins, member.pins + by
            if bool(before) is not bool(member.pins):
                size = member.size_bytes if member.pins else -member.size_bytes
                self.pinned_bytes += size
                member.tenant.pinned_bytes += size
                self._tiers.update_evictable(member)

    def _on_unindexed(self, chunk: Chunk) -> None:
        """End the pins of a deleted chunk, which has left the index before its ancestors."""
        for pin in self._pins_of.pop(chunk, []):
            self._pins.pop((chunk.root, pin.requested_key), None)
            self._add_to_path(chunk, -pin.count)
            pin.count = 0
            self._persist(pin)

    def _persist(self, pin: _Pin) -> None:
        name = NOTE_PREFIX + pin.chunk.root + pin.requested_key
        self._tiers.write_note(name, _COUNT.pack(pin.count) + pin.chunk.key if pin.count else None)
