"""Write batch: the net changes of a write group, without orphaned chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvsidecar import keys

from cache_daemon.durable import payload_codec
from cache_daemon.durable.compression_policy import CompressionPolicy
from cache_daemon.durable.durable_tier import Put, PutOutcome, PutResult, WriteGroup
from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.lmdb_env import Transaction
from cache_daemon.durable.payload_reader import StoredEntry
from cache_daemon.durable.record_format import (
    HEADERS,
    MINIMUM_VALUE_BYTES,
    NOTES,
    PAYLOADS,
    RECENCY,
    Record,
    encode_note,
    encode_record,
    encode_tick,
    encrypt_header,
)


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk as it will be stored."""

    put: Put
    record: Record
    stored: bytes | memoryview

    @property
    def key(self) -> bytes:
        return self.put.header.prefix_hash

    @property
    def parent(self) -> bytes:
        return self.put.header.parent_prefix_hash

    def value(self) -> bytes | memoryview:
        """Return the stored payload, padded so that it gets its own pages."""
        if len(self.stored) >= MINIMUM_VALUE_BYTES:
            return self.stored
        return bytes(self.stored).ljust(MINIMUM_VALUE_BYTES, b"\0")


class ChildIndex:
    """Children of each stored chunk."""

    def __init__(self, entries: Mapping[bytes, StoredEntry]) -> None:
        self._children: dict[bytes, set[bytes]] = {}
        for key, entry in entries.items():
            self.add(key, entry.parent)

    def children_of(self, key: bytes) -> Iterable[bytes]:
        return self._children.get(key, ())

    def add(self, key: bytes, parent: bytes) -> None:
        self._children.setdefault(parent, set()).add(key)

    def discard(self, key: bytes, parent: bytes) -> None:
        children = self._children.get(parent)
        if children is not None:
            children.discard(key)
            if not children:
                del self._children[parent]


class WriteBatch:
    """Net changes of a group to the stored entries; ``apply_batch`` writes them."""

    def __init__(self, entries: Mapping[bytes, StoredEntry], children: ChildIndex) -> None:
        self._entries, self._children = entries, children
        self.removed: dict[bytes, None] = {}
        self.stored: dict[bytes, EncodedChunk] = {}
        self._replaced: set[bytes] = set()

    def has(self, key: bytes) -> bool:
        """Return True if the changes so far leave the chunk stored."""
        return key in self.stored or (key in self._entries and key not in self.removed)

    def remove(self, key: bytes) -> None:
        self.stored.pop(key, None)
        self.removed[key] = None

    def put(self, packed: EncodedChunk) -> None:
        """If a chunk's parent is stored, store the chunk and remove the chunks that it replaces."""
        if not self._has_parent(packed):
            return
        for key in packed.put.replaces:
            if key != packed.key:
                self.remove(key)
        self._replaced.update(packed.put.replaces)
        self.removed.pop(packed.key, None)
        self.stored[packed.key] = packed

    def _has_parent(self, packed: EncodedChunk) -> bool:
        return packed.parent == packed.put.header.root or self.has(packed.parent)

    def result(self, packed: EncodedChunk | None) -> PutResult:
        """Return the result of a put after all changes; of None, the result of a corrupt chunk."""
        if packed is None:
            return PutResult(PutOutcome.CORRUPT)
        if packed.key in self.stored:
            return PutResult(PutOutcome.STORED, packed.record.stored_bytes)
        is_replaced = packed.key in self._replaced and self._has_parent(packed)
        return PutResult(PutOutcome.REPLACED if is_replaced else PutOutcome.PARENT_MISSING)

    def remove_orphans(self) -> None:
        """Remove the descendants of removed chunks."""
        waiting = list(self.removed)
        young: dict[bytes, list[bytes]] = {}
        for packed in self.stored.values():
            young.setdefault(packed.parent, []).append(packed.key)
        for key in waiting:
            for child in (*self._children.children_of(key), *young.get(key, ())):
                entry_parent = self.stored[child].parent if child in self.stored else key
                if self.has(child) and entry_parent == key:
                    self.remove(child)
                    waiting.append(child)


def encode_chunks(
    puts: Sequence[Put], compressor: CompressionPolicy, cipher: Cipher, last_order: int
) -> list[EncodedChunk | None]:
    """Encode chunks for storing; None for payloads that do not match their header."""
    sound = [
        len(put.payload) == put.header.payload_bytes and keys.checksum(put.payload) == put.header.checksum
        for put in puts
    ]
    small = iter(compressor.compress([put for put, good in zip(puts, sound, strict=True) if good]))
    return [
        _packed(put, next(small), cipher, last_order + position + 1) if good else None
        for position, (put, good) in enumerate(zip(puts, sound, strict=True))
    ]


def _packed(put: Put, small: bytes | None, cipher: Cipher, order: int) -> EncodedChunk:
    kind, plain = (payload_codec.RAW, put.payload) if small is None else (payload_codec.PLANES, small)
    stored = cipher.encrypt(PAYLOADS + b"\0" + put.header.prefix_hash, plain)
    header = encrypt_header(cipher, put.header)
    return EncodedChunk(put, Record(kind, order, len(stored), keys.checksum(memoryview(stored)), header), stored)


def apply_batch(txn: Transaction, cipher: Cipher, group: WriteGroup, changes: WriteBatch) -> None:
    """Write the changes, notes and ticks of a group into a transaction."""
    for key in changes.removed:
        for database in (HEADERS, PAYLOADS, RECENCY):
            txn.delete(database, key)
    for key, packed in changes.stored.items():
        txn.put(HEADERS, key, encode_record(key, packed.record))
        txn.put(PAYLOADS, key, packed.value())
    for name, value in group.notes.items():
        if value is None:
            txn.delete(NOTES, name)
        else:
            txn.put(NOTES, name, encode_note(cipher, name, value))
    for key, tick in group.used.items():
        if changes.has(key):
            txn.put(RECENCY, key, encode_tick(key, tick))
