"""How a chunk looks in a remote engine: a record that says everything of it, and its payload in parts.

The record, integers little-endian::

    "KVSR" uint8 version, uint8 codec, uint16 parts
    uint64 stored length, uint64 XXH3-64 of the stored payload, uint64 end of its time (Unix seconds; 0: none)
    16 bytes mark
    ChunkHeader (sealed)
    uint64 XXH3-64 of the record's name and everything before

The payload is compressed as in the durable tier (``durable/codec.py``), then sealed (``durable/encryption.py``),
then cut. A
record and a payload are sealed for their own place, so neither can stand for another's. A mark says which deletions
the writer knew of: a value with another one than the tenant has now does not count.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable import codec
from cache_daemon.durable.encryption import Seal, Unsealed
from cache_daemon.durable.header_check import is_what_it_names, layout_bytes
from cache_daemon.remote.key_schema import RECORD_VERSION

MARK_BYTES = 16
MOST_PARTS = 4096
_MOST_SECONDS = 1 << 40  # of Unix time; milliseconds of it still fit where ends of chunks are noted
_MAGIC = b"KVSR"
_PREFIX = struct.Struct(f"<4sBBHQQQ{MARK_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_PLACE_HEAD, _PLACE_PAYLOAD = b"remote head\0", b"remote payload\0"


class Unfit(Exception):
    """A value that is not what its name says. ``damaged`` ones are worth nothing to anybody; the others are of another
    version, or sealed with another key, and may be somebody's."""

    def __init__(self, text: str, *, damaged: bool = True) -> None:
        super().__init__(text)
        self.damaged = damaged


@dataclass(frozen=True)
class Entry:
    """A chunk in a remote engine. ``header`` is complete, with its tokens."""

    header: ChunkHeader
    codec: int
    parts: int
    stored_length: int
    stored_checksum: int
    ends_at: int
    mark: bytes


def mark_of(everything: bytes | None, tenant: bytes | None) -> bytes | None:
    """The mark that values of a tenant have now, of the two that the engine has. None without the tenant's: it was
    never set, or is lost, and nothing counts then, or values of before a deletion would count again. Everything's may
    be absent, since who sets it removes the tenants'."""
    if tenant is None:
        return None
    both = hashlib.sha256(b"%d" % len(everything or b"") + (everything or b"") + b"\0" + tenant)
    return both.digest()[:MARK_BYTES]


def packed(seal: Seal, header: ChunkHeader, payload: memoryview, packer: codec.Packer | None) -> tuple[int, memoryview]:
    """The codec and the bytes that are stored of a payload, compressed by a ``packer`` if there is one. Heavy, without
    the GIL for the most part."""
    small = None if packer is None else packer.pack(header, payload)
    kind, plain = (codec.RAW, payload) if small is None else (codec.PLANES, memoryview(small))
    if not seal.overhead:
        return kind, memoryview(bytes(plain)) if small is None else plain
    return kind, memoryview(seal.close_value(_PLACE_PAYLOAD + header.root + header.prefix_hash, plain))


def unpacked(seal: Seal, entry: Entry, parts: Sequence[bytes], target: memoryview) -> None:
    """Fills ``target`` with the payload, checked. Heavy, and without the GIL for the most part. Raises Unfit."""
    if sum(map(len, parts)) != entry.stored_length:
        raise Unfit("its parts have another length than its record says")
    stored = parts[0] if len(parts) == 1 else b"".join(parts)
    if keys.checksum(stored) != entry.stored_checksum:
        raise Unfit("its payload is damaged")
    plain = memoryview(stored)
    header = entry.header
    if seal.overhead:
        opened = memoryview(bytearray(max(0, len(stored) - seal.overhead)))
        try:
            seal.open_value(_PLACE_PAYLOAD + header.root + header.prefix_hash, plain, opened)
        except Unsealed as error:
            raise Unfit("its payload is not sealed with this key", damaged=False) from error
        plain = opened
    try:
        if entry.codec == codec.RAW:
            target[:] = plain
        else:
            codec.unpack(plain, target)
    except ValueError as error:
        raise Unfit("its payload cannot be unpacked") from error
    if keys.checksum(target) != header.checksum:
        raise Unfit("its payload is another chunk's")


def encode_record(seal: Seal, name: str, entry: Entry) -> bytes:
    """The record of an entry, for its name."""
    known = ChunkHeader()
    known.CopyFrom(entry.header)
    known.DiscardUnknownFields()
    sealed = bytes(seal.close_value(_PLACE_HEAD + name.encode(), known.SerializeToString()))
    prefix = _PREFIX.pack(
        _MAGIC, RECORD_VERSION, entry.codec, entry.parts, entry.stored_length, entry.stored_checksum, entry.ends_at,
        entry.mark,
    )  # fmt: skip
    return prefix + sealed + _digest(name, prefix + sealed)


def decode_record(seal: Seal, name: str, record: bytes) -> Entry:
    """The entry of a record, its header checked against its own hashes and layout. Raises Unfit."""
    if len(record) < _PREFIX.size + _CHECKSUM.size or record[:4] != _MAGIC:
        raise Unfit("it is no record")
    body = record[: -_CHECKSUM.size]
    if record[-_CHECKSUM.size :] != _digest(name, body):
        raise Unfit("its record is damaged, or another one's")
    _, version, kind, parts, length, checksum, ends_at, mark = _PREFIX.unpack_from(body)
    if version != RECORD_VERSION or kind not in (codec.RAW, codec.PLANES):
        raise Unfit("its record is of another version", damaged=False)
    header = _open_header(seal, name, body[_PREFIX.size :])
    # What is packed is smaller than what is not; what is sealed is larger by the seal.
    if not 1 <= parts <= MOST_PARTS or length > header.payload_bytes + seal.overhead:
        raise Unfit("its record has impossible sizes")
    if ends_at >= _MOST_SECONDS:
        raise Unfit("its record ends in no time that there will be")
    return Entry(header, kind, parts, length, checksum, ends_at, mark)


def _open_header(seal: Seal, name: str, sealed: bytes) -> ChunkHeader:
    plain = bytearray(max(0, len(sealed) - seal.overhead))
    try:
        seal.open_value(_PLACE_HEAD + name.encode(), memoryview(sealed), memoryview(plain))
        header = ChunkHeader.FromString(bytes(plain))
    except (Unsealed, DecodeError, ValueError) as error:
        raise Unfit("its header is not sealed with this key, or cannot be read", damaged=False) from error
    if header.format_version != keys.FORMAT_VERSION:
        raise Unfit("it is of another format", damaged=False)
    if header.token_count != len(header.token_ids) or not is_what_it_names(header):
        raise Unfit("it is another chunk than its hash names")
    try:
        size = layout_bytes(header)
    except ValueError as error:
        raise Unfit("it has an impossible layout") from error
    if size != header.payload_bytes or not 0 <= header.prefill_seconds < float("inf"):
        raise Unfit("it has another size than its layout")
    return header


def _digest(name: str, body: bytes) -> bytes:
    return _CHECKSUM.pack(keys.checksum(name.encode() + b"\0" + body))
