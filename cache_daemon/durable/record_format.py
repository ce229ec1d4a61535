"""Record format of the store's databases, version 2.

- ``meta``: ``format``, ``key`` (check value of the encryption key) and ``commit`` (number of the last transaction).
- ``headers``: prefix hash -> ``uint8 2, uint8 codec, uint16 0, uint32 0, uint64 order, uint64 stored length,
  uint64 XXH3-64 of the stored payload``, the ChunkHeader (encrypted), and the checksum.
- ``payloads``: prefix hash -> the stored payload (compressed, then encrypted), padded with zeros to at least 2,048
  bytes. So every payload has its own pages, which do not move during the life of the entry.
- ``notes``: name -> value (encrypted), and the checksum. The note of an expiry is Unix milliseconds as ``uint64``.
- ``recency``: prefix hash -> ``uint64`` tick of last use, and the checksum.

The checksum is the XXH3-64 of database name, key and everything before it; all integers are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from kvsidecar.errors import KVSidecarError

from cache_daemon.durable.durable_tier import PAGE_BYTES, whole_pages
from cache_daemon.durable.encryption import Cipher, DecryptError

FORMAT = b"2"
META, HEADERS, PAYLOADS, NOTES, RECENCY = b"meta", b"headers", b"payloads", b"notes", b"recency"
DATABASES = (META, HEADERS, PAYLOADS, NOTES, RECENCY)
MINIMUM_VALUE_BYTES = 2048
_PREFIX = struct.Struct("<BBHIQQQ")
_VERSION = 2
_CHECKSUM_BYTES = 8
_LARGEST_NODE_BYTES = 2038
# Disk bytes of a chunk's two index nodes (payload location, last use): 130 bytes in leaves that are two thirds full.
_INDEX_BYTES = 195


class CorruptRecord(Exception):
    """A record whose bytes differ from the written bytes."""


class Record(NamedTuple):
    """A stored chunk without the contents of its header."""

    codec: int
    order: int
    stored_length: int
    stored_checksum: int
    encrypted_header: bytes

    @property
    def stored_bytes(self) -> int:
        """Disk space of the entry."""
        header = 8 + keys.HASH_BYTES + _PREFIX.size + len(self.encrypted_header) + _CHECKSUM_BYTES
        # Leaves of keys in random order are two thirds full.
        cost = header * 3 // 2 if header <= _LARGEST_NODE_BYTES else whole_pages(header)
        return self.value_pages * PAGE_BYTES + cost + _INDEX_BYTES

    @property
    def value_pages(self) -> int:
        """Number of adjacent pages of the stored payload."""
        return whole_pages(max(self.stored_length, MINIMUM_VALUE_BYTES)) // PAGE_BYTES


def _checksum(database: bytes, key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(database + b"\0" + key + b"\0" + value).to_bytes(_CHECKSUM_BYTES, "little")


def checked(database: bytes, key: bytes, value: bytes) -> bytes:
    """Return a value followed by its checksum."""
    return value + _checksum(database, key, value)


def verified(database: bytes, key: bytes, stored: bytes) -> bytes:
    """Return the value without its checksum. Raises CorruptRecord."""
    value = stored[:-_CHECKSUM_BYTES]
    if len(stored) < _CHECKSUM_BYTES or stored[-_CHECKSUM_BYTES:] != _checksum(database, key, value):
        raise CorruptRecord(f"{database.decode()} {key[:16].hex()} is damaged")
    return value


def encode_record(key: bytes, record: Record) -> bytes:
    prefix = _PREFIX.pack(
        _VERSION, record.codec, 0, 0, record.order, record.stored_length, record.stored_checksum
    )  # fmt: skip
    return checked(HEADERS, key, prefix + record.encrypted_header)


def decode_record(key: bytes, stored: bytes) -> Record:
    """Decode a record. Raises CorruptRecord."""
    value = verified(HEADERS, key, stored)
    if len(value) < _PREFIX.size or len(key) != keys.HASH_BYTES or value[0] != _VERSION:
        raise CorruptRecord(f"headers {key[:16].hex()} is of another version")
    _, codec, _, _, order, length, checksum = _PREFIX.unpack_from(value)
    return Record(codec, order, length, checksum, value[_PREFIX.size :])


def encrypt_header(cipher: Cipher, header: ChunkHeader) -> bytes:
    """Return the header as stored, without fields that this version does not know."""
    known = ChunkHeader()
    known.CopyFrom(header)
    known.DiscardUnknownFields()
    return bytes(cipher.encrypt(HEADERS + b"\0" + header.prefix_hash, known.SerializeToString()))


def decrypt_header(cipher: Cipher, key: bytes, record: Record) -> ChunkHeader:
    """Decode the header of a record and verify its hash. Raises CorruptRecord."""
    try:
        header = ChunkHeader.FromString(decrypt_value(cipher, HEADERS, key, record.encrypted_header))
    except DecodeError as error:
        raise CorruptRecord(f"headers {key[:16].hex()} cannot be decoded") from error
    if header.prefix_hash != key or keys.prefix_hash(header.parent_prefix_hash, header.token_ids[:]) != key:
        raise CorruptRecord(f"headers {key[:16].hex()} is that of another chunk")
    if not is_valid_duration(header.prefill_seconds):
        raise CorruptRecord(f"headers {key[:16].hex()} says that it took {header.prefill_seconds} s")
    return header


def decrypt_value(cipher: Cipher, database: bytes, key: bytes, encrypted: bytes) -> bytes:
    """Decrypt a small value. Raises CorruptRecord."""
    if not cipher.max_overhead:
        return encrypted
    try:
        plain = bytearray(cipher.plain_length(encrypted))
        cipher.decrypt(database + b"\0" + key, memoryview(encrypted), memoryview(plain))
    except DecryptError as error:
        raise CorruptRecord(f"{database.decode()} {key[:16].hex()} is not sealed with this key") from error
    return bytes(plain)


def encode_note(cipher: Cipher, name: bytes, value: bytes) -> bytes:
    return checked(NOTES, name, bytes(cipher.encrypt(NOTES + b"\0" + name, value)))


def decode_note(cipher: Cipher, name: bytes, stored: bytes) -> bytes:
    """Decode a note. Raises CorruptRecord."""
    return decrypt_value(cipher, NOTES, name, verified(NOTES, name, stored))


def encode_tick(key: bytes, tick: int) -> bytes:
    return checked(RECENCY, key, tick.to_bytes(8, "little"))


def decode_tick(key: bytes, stored: bytes) -> int:
    """Decode a tick of last use. Raises CorruptRecord."""
    return int.from_bytes(verified(RECENCY, key, stored), "little")


def hashes_match(header: ChunkHeader) -> bool:
    """Return True when the header's hashes match its tokens."""
    tokens = header.token_ids[:]
    return (
        keys.prefix_hash(header.parent_prefix_hash, tokens) == header.prefix_hash
        and keys.content_hash(header.root, tokens) == header.content_hash
    )


def is_valid_duration(seconds: float) -> bool:
    """Return True for a possible prefill time: a finite number, at least 0."""
    return 0 <= seconds < math.inf


def layout_payload_bytes(header: ChunkHeader) -> int:
    """Return the payload size of a header's layout. Raises ValueError for an impossible layout."""
    try:
        return layout_of(header).size_bytes
    except (KVSidecarError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(str(error)) from error


EXPIRY_NOTE_PREFIX = b"kept-until:"
_EXPIRY = struct.Struct("<Q")
_NEVER_MS = (1 << 64) - 1


def encode_expiry(until: float) -> bytes:
    """Encode an expiry in Unix seconds, which may be infinite, as a note."""
    return _EXPIRY.pack(int(until * 1000) if until * 1000 < _NEVER_MS else _NEVER_MS)


def decode_expiry(note: bytes) -> float | None:
    """Return the expiry of a note in Unix seconds; None for an invalid note."""
    if len(note) != _EXPIRY.size:
        return None
    milliseconds = _EXPIRY.unpack(note)[0]
    return milliseconds / 1000 if milliseconds < _NEVER_MS else math.inf


def expiries_of(notes: Mapping[bytes, bytes]) -> dict[bytes, int]:
    """Return the expiries of notes in Unix milliseconds, by prefix hash."""
    return {
        name.removeprefix(EXPIRY_NOTE_PREFIX): _EXPIRY.unpack(note)[0]
        for name, note in notes.items()
        if name.startswith(EXPIRY_NOTE_PREFIX) and len(note) == _EXPIRY.size
    }


def merge_expiries(
    asked: Iterable[tuple[bytes, int]], stored: frozenset[bytes], notes: Mapping[bytes, bytes]
) -> dict[bytes, bytes | None]:
    """Return the changes to the expiry notes when chunks with the expiries ``asked`` are added; None deletes a note.

    Expiries are Unix milliseconds; 0 means never. The latest expiry wins. A chunk in ``stored`` without a note never
    expires.
    """
    known, out = expiries_of(notes), dict[bytes, bytes | None]()
    for key, end in asked:
        if not end:
            if key in known:
                out[EXPIRY_NOTE_PREFIX + key] = None
        elif key not in stored or known.get(key, end) < end:
            out[EXPIRY_NOTE_PREFIX + key] = _EXPIRY.pack(end)
    return out
