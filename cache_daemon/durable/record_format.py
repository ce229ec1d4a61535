"""How entries look in the store's databases, format 2.

- ``meta``: ``format``, ``key`` (check value of the encryption key) and ``commit`` (number of the last transaction).
- ``headers``: prefix hash -> ``uint8 2, uint8 codec, uint16 0, uint32 0, uint64 order, uint64 stored length,
  uint64 XXH3-64 of the stored payload``, the ChunkHeader (sealed), and the checksum.
- ``payloads``: prefix hash -> the stored payload (packed, then sealed), with zeros up to 2,048 bytes. So every payload
  has pages of its own, which stay where they are as long as the entry lives.
- ``notes``: name -> value (sealed), and the checksum.
- ``recency``: prefix hash -> ``uint64`` tick of last use, and the checksum.

The checksum is the XXH3-64 of database name, key and everything before it; all integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash
from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.durable_tier import whole_pages
from cache_daemon.durable.encryption import Cipher, DecryptError
from cache_daemon.durable.header_check import is_valid_duration

FORMAT = b"2"
META, HEADERS, PAYLOADS, NOTES, RECENCY = b"meta", b"headers", b"payloads", b"notes", b"recency"
DATABASES = (META, HEADERS, PAYLOADS, NOTES, RECENCY)
MINIMUM_VALUE_BYTES = 2048
_PREFIX = struct.Struct("<BBHIQQQ")
_VERSION = 2
_CHECKSUM_BYTES = 8
_LARGEST_NODE_BYTES = 2038
# Nodes of a payload's place and of its last use, 130 bytes in leaves that are two thirds full.
_INDEX_BYTES = 195


class CorruptRecord(Exception):
    """A record whose bytes are not those that were written."""


class Record(NamedTuple):
    """What is known of a stored chunk without its header's contents."""

    codec: int
    order: int
    stored_length: int
    stored_checksum: int
    encrypted_header: bytes

    @property
    def stored_bytes(self) -> int:
        """What the entry costs on disk."""
        header = 8 + keys.HASH_BYTES + _PREFIX.size + len(self.encrypted_header) + _CHECKSUM_BYTES
        # Leaves of keys in random order are two thirds full.
        cost = header * 3 // 2 if header <= _LARGEST_NODE_BYTES else whole_pages(header)
        return whole_pages(max(self.stored_length, MINIMUM_VALUE_BYTES)) + cost + _INDEX_BYTES


def _checksum(database: bytes, key: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(database + b"\0" + key + b"\0" + value).to_bytes(_CHECKSUM_BYTES, "little")


def checked(database: bytes, key: bytes, value: bytes) -> bytes:
    """A value with its checksum behind it."""
    return value + _checksum(database, key, value)


def verified(database: bytes, key: bytes, stored: bytes) -> bytes:
    """The value without its checksum. Raises CorruptRecord."""
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
    """Raises CorruptRecord."""
    value = verified(HEADERS, key, stored)
    if len(value) < _PREFIX.size or len(key) != keys.HASH_BYTES or value[0] != _VERSION:
        raise CorruptRecord(f"headers {key[:16].hex()} is of another version")
    _, codec, _, _, order, length, checksum = _PREFIX.unpack_from(value)
    return Record(codec, order, length, checksum, value[_PREFIX.size :])


def encrypt_header(cipher: Cipher, header: ChunkHeader) -> bytes:
    """The header as it is stored, without fields that this version does not know."""
    known = ChunkHeader()
    known.CopyFrom(header)
    known.DiscardUnknownFields()
    return bytes(cipher.encrypt(HEADERS + b"\0" + header.prefix_hash, known.SerializeToString()))


def decrypt_header(cipher: Cipher, key: bytes, record: Record) -> ChunkHeader:
    """The header of a record; its hash is that of its parent and tokens. Raises CorruptRecord."""
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
    """A small value as it was before it was sealed. Raises CorruptRecord."""
    if not cipher.overhead:
        return encrypted
    if len(encrypted) < cipher.overhead:
        raise CorruptRecord(f"{database.decode()} {key[:16].hex()} is too short")
    plain = bytearray(len(encrypted) - cipher.overhead)
    try:
        cipher.decrypt(database + b"\0" + key, memoryview(encrypted), memoryview(plain))
    except DecryptError as error:
        raise CorruptRecord(f"{database.decode()} {key[:16].hex()} is not sealed with this key") from error
    return bytes(plain)


def encode_note(cipher: Cipher, name: bytes, value: bytes) -> bytes:
    return checked(NOTES, name, bytes(cipher.encrypt(NOTES + b"\0" + name, value)))


def decode_note(cipher: Cipher, name: bytes, stored: bytes) -> bytes:
    """Raises CorruptRecord."""
    return decrypt_value(cipher, NOTES, name, verified(NOTES, name, stored))


def encode_tick(key: bytes, tick: int) -> bytes:
    return checked(RECENCY, key, tick.to_bytes(8, "little"))


def decode_tick(key: bytes, stored: bytes) -> int:
    """Raises CorruptRecord."""
    return int.from_bytes(verified(RECENCY, key, stored), "little")
