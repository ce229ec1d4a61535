"""Pins: counted exemptions from eviction that survive restarts and supersession.

Each pin belongs to a caller. A caller is external if it does not use the private socket. All external callers together
may use a share of the pin budget, of the arena and of the number of pins; each of them may use a smaller share.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import structlog
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ChunkNotFound, QuotaExceeded
from kvsidecar.keys import HASH_BYTES

from cache_daemon.memory.arena import footprint
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.lease_pin_limits import LeasePinLimit, LeasePinLimits
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager

NOTE_PREFIX = b"pin:"
_COUNT = struct.Struct("<I")
_CALLER_BYTES = 16
_MAX_PINS = 10_000
_ARENA_SHARE = 0.5
# Shares of each limit: for all external callers together, and for one external caller.
_EXTERNAL_SHARE, _CALLER_SHARE = 0.75, 0.25

log = structlog.get_logger("cache_daemon")


@dataclass(eq=False, slots=True)
class _Pin:
    requested_key: bytes  # the prefix hash that was pinned
    chunk: Chunk  # the chunk that now has the pin; it may have superseded the pinned chunk
    caller: bytes  # hash of an external caller's name; empty on the private socket
    usage: LeasePinLimit | None  # usage of the external caller; None on the private socket
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Scope:
    """The pins that one limit covers: all pins, pins of external callers, or pins of one caller."""

    name: str
    share: float  # share of each limit that these pins may use
    usage: LeasePinLimit | None  # None for all pins

    def has(self, chunk: Chunk) -> bool:
        return chunk.pins > 0 if self.usage is None else chunk in self.usage


class Pins:
    """Pinned prefixes of one store. A pin counts for a chunk and all its ancestors."""

    def __init__(self, tiers: TierManager, budget_bytes: int) -> None:
        """Create the table; ``budget_bytes`` limits all pinned chunks.

        Pins of chunks that are not durable are limited to half of the arena.
        """
        self._tiers, self.budget_bytes = tiers, budget_bytes
        # By root and requested key, then by caller.
        self._pins: dict[tuple[bytes, bytes], dict[bytes, _Pin]] = {}
        self._pins_of: dict[Chunk, list[_Pin]] = {}
        self._num_pins: Counter[bytes] = Counter()  # by caller
        external, own = int(budget_bytes * _EXTERNAL_SHARE), int(budget_bytes * _CALLER_SHARE)
        self._external = LeasePinLimits(external, own, lambda chunk: chunk.size_bytes)
        self.pinned_bytes = self._num_dropped = 0
        self.on_added: list[Callable[[TenantAccount], None]] = []
        tiers.on_unindexed.append(self._on_unindexed)

    def add(self, chunk: Chunk, caller: str = "") -> int:
        """Pin a chunk and its ancestors once more. Returns the number of these chunks. Raises QuotaExceeded.

        ``caller`` names an external caller; it is empty on the private socket.
        """
        pin, path = self._find(chunk, chunk.key, _caller_id(caller)), self._tiers.index.path(chunk)
        self._check(pin, path)
        self._add(pin, 1)
        self._persist(pin)
        return len(path)

    def remove(self, root: bytes, prefix_hash: bytes, caller: str = "") -> int:
        """End one pin of a prefix, preferably the caller's own.

        ``prefix_hash`` is the hash that was pinned, or the hash of the chunk that superseded it. Returns the number of
        chunks of the prefix. Raises ChunkNotFound.
        """
        found = list(self._pins.get((root, prefix_hash), {}).values())
        if not found:
            chunk = self._tiers.index.get(prefix_hash)
            found = self._pins_of.get(chunk, []) if chunk is not None and chunk.root == root else []
        if not found:
            raise ChunkNotFound(f"no pin on {prefix_hash.hex()} in this namespace and tenant")
        own = _caller_id(caller)
        pin = next((p for p in found if p.caller == own), found[0])
        chunks = len(self._tiers.index.path(pin.chunk))
        self._add(pin, -1)
        self._persist(pin)
        return chunks

    def transfer(self, old: Chunk, new: Chunk) -> bool:
        """Move the pins of a chunk to the longer sibling that supersedes it.

        Returns False if that would exceed a limit of pins; the chunk must then not be superseded.
        """
        moving = list(self._pins_of.get(old, ()))
        try:
            for pin in moving:
                self._check_bytes(pin, [new], replaced=old)
        except QuotaExceeded:
            return False
        for pin in moving:
            count = pin.count
            self._add(pin, -count)
            pin.chunk = new
            self._add(pin, count)
            self._persist(pin)
        return True

    def restore(self, name: bytes, value: bytes) -> None:
        """Restore a pin of an earlier start, unless its chunk is missing or the pin exceeds the limits."""
        key = name[len(NOTE_PREFIX) :]
        root, asked, caller = key[:HASH_BYTES], key[HASH_BYTES : 2 * HASH_BYTES], key[2 * HASH_BYTES :]
        if len(value) == _COUNT.size + HASH_BYTES and len(caller) in (0, _CALLER_BYTES):
            count, current = _COUNT.unpack_from(value)[0], value[_COUNT.size :]
            chunk = self._tiers.index.get(current) or self._tiers.index.get(asked)
            if chunk is not None and chunk.root == root and count:
                pin = self._find(chunk, asked, caller)
                try:
                    self._check(pin, self._tiers.index.path(chunk))
                except QuotaExceeded:
                    self._num_dropped += 1
                else:
                    self._add(pin, count)
                    return
        self._tiers.write_note(name, None)

    def finish_restore(self) -> None:
        """Log the number of pins that ended because they exceed today's limits."""
        if self._num_dropped:
            log.warning("dropped pins of an earlier start: they exceed the limits of pins", pins=self._num_dropped)

    # ---- limits ---------------------------------------------------------------------------------------------

    def _check(self, pin: _Pin, path: Sequence[Chunk]) -> None:
        """Raise QuotaExceeded unless the limits allow to count this pin once more."""
        if not pin.count:
            used = self._num_pins.total(), self._num_pins.total() - self._num_pins[b""], self._num_pins[pin.caller]
            for scope, pins in zip(self._scopes(pin), used, strict=False):
                most = int(_MAX_PINS * scope.share)
                if pins >= most:
                    raise QuotaExceeded(f"{scope.name} may have {most} pins, and {pins} exist: unpin something first")
        self._check_bytes(pin, path)

    def _check_bytes(self, pin: _Pin, path: Sequence[Chunk], replaced: Chunk | None = None) -> None:
        """Raise QuotaExceeded unless the limits allow to pin a path.

        The path's last chunk supersedes ``replaced``, if given.
        """
        limits, leaving = path[-1].tenant.limits, [] if replaced is None else [replaced]
        for scope in self._scopes(pin):
            added, left = [c for c in path if not scope.has(c)], [c for c in leaving if scope.has(c)]
            more = sum(c.size_bytes for c in added) - sum(c.size_bytes for c in left)
            if scope.usage is None:
                _check_limit(scope.name, more, self.pinned_bytes, self.budget_bytes)
                if limits.pin_bytes is not None:
                    _check_limit("this tenant", more, path[-1].tenant.pinned_bytes, limits.pin_bytes)
            elif scope.usage.whole is None or limits.pin_bytes is None:
                # A tenant's own quota replaces the share of one caller.
                _check_limit(scope.name, more, scope.usage.size_bytes, scope.usage.max_bytes)
            # Pinned chunks without a durable copy cannot leave the arena.
            parked = [c for c in added if c.disk_state is not Residency.PRESENT]
            more = sum(map(_footprint, parked)) - sum(_footprint(c) for c in left if c in self._tiers.arena_only_pins)
            most = int(self._tiers.arena.size_bytes * _ARENA_SHARE * scope.share)
            _check_limit(scope.name, more, self._parked_bytes(scope), most, "of the arena while they are not durable")

    @staticmethod
    def _scopes(pin: _Pin) -> list[_Scope]:
        """Return the scopes whose limits a pin must respect."""
        scopes = [_Scope("all callers together", 1.0, None)]
        if pin.usage is not None:
            scopes.append(_Scope("callers beyond the private socket", _EXTERNAL_SHARE, pin.usage.whole))
            scopes.append(_Scope("this caller", _CALLER_SHARE, pin.usage))
        return scopes

    def _parked_bytes(self, scope: _Scope) -> int:
        """Return the arena bytes of a scope's chunks that cannot leave the arena."""
        parked, usage = self._tiers.arena_only_pins, scope.usage
        if usage is None:
            return self._tiers.arena_only_pins_bytes
        if len(usage) < len(parked):
            return sum(_footprint(c) for c in usage if c in parked)
        return sum(_footprint(c) for c in parked if c in usage)

    # ---- helpers --------------------------------------------------------------------------------------------

    def _find(self, chunk: Chunk, asked: bytes, caller: bytes) -> _Pin:
        """Return a caller's pin of a requested key, or a new pin with count 0."""
        found = self._pins.get((chunk.root, asked), {}).get(caller)
        return found or _Pin(asked, chunk, caller, self._external.of(caller) if caller else None)

    def _add(self, pin: _Pin, by: int) -> None:
        """Add to the count of a pin, and list it while the count is above 0."""
        name, was_listed = (pin.chunk.root, pin.requested_key), pin.count > 0
        pin.count += by
        if pin.count and not was_listed:
            self._pins.setdefault(name, {})[pin.caller] = pin
            self._pins_of.setdefault(pin.chunk, []).append(pin)
            self._num_pins[pin.caller] += 1
        elif was_listed and not pin.count:
            self._pins_of[pin.chunk].remove(pin)
            if not self._pins_of[pin.chunk]:
                del self._pins_of[pin.chunk]
            del self._pins[name][pin.caller]
            if not self._pins[name]:
                del self._pins[name]
            self._num_pins[pin.caller] -= 1
        self._add_to_path(pin, by)
        if by > 0:
            for notify in self.on_added:
                notify(pin.chunk.tenant)

    def _add_to_path(self, pin: _Pin, by: int) -> None:
        """Add to the pin count of a pin's chunk and its ancestors."""
        for member in self._tiers.index.path(pin.chunk):
            if pin.usage is not None:
                pin.usage.add(member, by)
            before, member.pins = member.pins, member.pins + by
            if bool(before) is not bool(member.pins):
                size = member.size_bytes if member.pins else -member.size_bytes
                self.pinned_bytes += size
                member.tenant.pinned_bytes += size
                self._tiers.update_evictable(member)

    def _on_unindexed(self, chunk: Chunk) -> None:
        """End the pins of a deleted chunk, which has left the index before its ancestors."""
        for pin in list(self._pins_of.get(chunk, ())):
            self._add(pin, -pin.count)
            self._persist(pin)

    def _persist(self, pin: _Pin) -> None:
        name = NOTE_PREFIX + pin.chunk.root + pin.requested_key + pin.caller
        self._tiers.write_note(name, _COUNT.pack(pin.count) + pin.chunk.key if pin.count else None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pins, chunks and usages add up."""
        pins = [pin for of_name in self._pins.values() for pin in of_name.values()]
        counts: Counter[Chunk] = Counter()
        usages: dict[LeasePinLimit, Counter[Chunk]] = {}
        for pin in pins:
            for member in self._tiers.index.path(pin.chunk):
                counts[member] += pin.count
                if pin.usage is not None:
                    usages.setdefault(pin.usage, Counter())[member] += pin.count
        assert counts == {c: c.pins for c in self._tiers.index if c.pins}, "pins of chunks do not add up"
        assert self.pinned_bytes == sum(c.size_bytes for c in counts), "pinned bytes do not add up"
        for usage, uses in usages.items():
            usage.check_integrity(uses)


def _caller_id(name: str) -> bytes:
    """Return the id of a caller in notes: a hash, so that the store contains no names."""
    return blake2b(name.encode(), digest_size=_CALLER_BYTES).digest() if name else b""


def _footprint(chunk: Chunk) -> int:
    return footprint(chunk.size_bytes)


def _check_limit(whose: str, more: int, used: int, limit: int, what: str = "in all") -> None:
    if more > 0 and used + more > limit:
        raise QuotaExceeded(
            f"the prefix has {format_size(more)} more to pin; {whose} may pin {format_size(limit)} {what}, and "
            f"{format_size(used)} are pinned already: unpin something first"
        )
