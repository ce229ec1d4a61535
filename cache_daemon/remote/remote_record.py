"""Record format of a chunk in the remote backend: metadata record, and payload in parts.

The record, integers little-endian::

    "KVSR" uint8 version, uint8 codec, uint16 parts
    uint64 stored length, uint64 XXH3-64 of the stored payload, uint64 expiry (Unix seconds; 0: none)
    16 bytes epoch
    ChunkHeader (encrypted)
    uint64 XXH3-64 of the record's name and everything before

The payload is compressed as in the durable tier (``durable/payload_codec.py``), then encrypted
(``durable/encryption.py``), then split into parts. The encryption authenticates the name of a record or payload, so an
attacker cannot exchange two records or payloads. The epoch says which deletions the writer knew: readers ignore a
record whose epoch is not the tenant's current epoch.

An epoch is 16 random bytes. A deletion replaces it. The lowest bit of the last byte is 1 if a deletion created the
epoch. It is 0 if a node created the epoch because the backend had none (at first, or after it lost its data). So a new
epoch with that bit proves a deletion. A new epoch without that bit proves only that the backend has lost data, perhaps
including a deletion.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable import payload_codec
from cache_daemon.durable.encryption import Cipher, DecryptError
from cache_daemon.durable.record_format import hashes_match, layout_payload_bytes
from cache_daemon.remote.key_schema import RECORD_VERSION

EPOCH_BYTES = 16
MAX_PARTS = 4096
# A header with the maximal number of tokens takes a third of this length.
MAX_RECORD_BYTES = 64 << 10
_MAX_UNIX_SECONDS = 1 << 40  # Unix seconds; in milliseconds they still fit into expiry notes
_MAGIC = b"KVSR"
_PREFIX = struct.Struct(f"<4sBBHQQQ{EPOCH_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_PLACE_HEAD, _PLACE_PAYLOAD = b"remote head\0", b"remote payload\0"


class InvalidRecord(Exception):
    """A value that does not match its name.

    A ``corrupt`` value is useless to every node. A value that is invalid but not corrupt has another version or
    encryption key, and may belong to another node.
    """

    def __init__(self, text: str, *, corrupt: bool = True) -> None:
        super().__init__(text)
        self.corrupt = corrupt


@dataclass(frozen=True)
class RemoteRecord:
    """A chunk in the backend. ``header`` is complete, with its tokens."""

    header: ChunkHeader
    codec: int
    num_parts: int
    stored_length: int
    stored_checksum: int
    expires_at: int
    epoch: bytes

    @property
    def max_part_bytes(self) -> int:
        """Length limit of a part: all parts but the last, which has a byte or more, have the same length."""
        return self.stored_length if self.num_parts == 1 else (self.stored_length - 1) // (self.num_parts - 1)


def record_epoch_of(everything: bytes | None, tenant: bytes | None) -> bytes | None:
    """Combine the global epoch and a tenant's epoch into the tenant's record epoch.

    Returns None if the tenant's epoch was never set or is lost. Then no record is valid; otherwise records from before
    a deletion would become valid again. The global epoch may be absent, since setting it removes the tenants' epochs.
    """
    if tenant is None:
        return None
    both = hashlib.sha256(b"%d" % len(everything or b"") + (everything or b"") + b"\0" + tenant)
    return both.digest()[:EPOCH_BYTES]


def new_epoch(*, deletion: bool) -> bytes:
    """Create a random epoch, with a bit that says whether a deletion made it."""
    drawn = secrets.token_bytes(EPOCH_BYTES)
    return drawn[:-1] + bytes([drawn[-1] & 0xFE | deletion])


def is_deletion_epoch(epoch: bytes | None) -> bool:
    """Return True for an epoch that a deletion made."""
    return epoch is not None and len(epoch) == EPOCH_BYTES and bool(epoch[-1] & 1)


def epoch_digest(epoch: bytes | None) -> bytes:
    """Hash an epoch of any length into ``EPOCH_BYTES``; empty for None."""
    return b"" if epoch is None else hashlib.sha256(epoch).digest()[:EPOCH_BYTES]


@dataclass(frozen=True)
class TenantEpochs:
    """Epochs of one tenant in the remote backend; None for a missing epoch.

    Each deletion of single chunks of the tenant replaces ``chunks_epoch``.
    """

    global_epoch: bytes | None
    tenant_epoch: bytes | None
    chunks_epoch: bytes | None

    @property
    def record_epoch(self) -> bytes | None:
        """Epoch that the tenant's records must carry; see ``record_epoch_of``."""
        return record_epoch_of(self.global_epoch, self.tenant_epoch)


def encode_payload(
    cipher: Cipher, header: ChunkHeader, payload: memoryview, plane_compressor: payload_codec.PlaneCompressor | None
) -> tuple[int, memoryview]:
    """Compress and encrypt a payload; return the codec and the stored bytes.

    Takes long, mostly without the GIL.
    """
    small = None if plane_compressor is None else plane_compressor.compress(header, payload)
    kind, plain = (payload_codec.RAW, payload) if small is None else (payload_codec.PLANES, memoryview(small))
    if not cipher.max_overhead:
        return kind, memoryview(bytes(plain)) if small is None else plain
    return kind, memoryview(cipher.encrypt(_PLACE_PAYLOAD + header.root + header.prefix_hash, plain))


def decode_payload(cipher: Cipher, entry: RemoteRecord, parts: Sequence[bytes], target: memoryview) -> None:
    """Decode and verify a payload into ``target``. Raises InvalidRecord.

    Takes long, mostly without the GIL.
    """
    if sum(map(len, parts)) != entry.stored_length:
        raise InvalidRecord("its parts have another length than its record says")
    stored = parts[0] if len(parts) == 1 else b"".join(parts)
    if keys.checksum(stored) != entry.stored_checksum:
        raise InvalidRecord("its payload is damaged")
    plain = memoryview(stored)
    header = entry.header
    if cipher.max_overhead:
        try:
            opened = memoryview(bytearray(cipher.plain_length(stored)))
            cipher.decrypt(_PLACE_PAYLOAD + header.root + header.prefix_hash, plain, opened)
        except DecryptError as error:
            raise InvalidRecord("its payload is not sealed with this key", corrupt=False) from error
        plain = opened
    try:
        if entry.codec == payload_codec.RAW:
            target[:] = plain
        else:
            payload_codec.decompress(plain, target)
    except ValueError as error:
        raise InvalidRecord("its payload cannot be unpacked") from error
    if keys.checksum(target) != header.checksum:
        raise InvalidRecord("its payload is another chunk's")


def encode_record(cipher: Cipher, name: str, entry: RemoteRecord) -> bytes:
    """Encode a record for its name."""
    known = ChunkHeader()
    known.CopyFrom(entry.header)
    known.DiscardUnknownFields()
    encrypted = bytes(cipher.encrypt(_PLACE_HEAD + name.encode(), known.SerializeToString()))
    prefix = _PREFIX.pack(
        _MAGIC, RECORD_VERSION, entry.codec, entry.num_parts, entry.stored_length, entry.stored_checksum,
        entry.expires_at, entry.epoch,
    )  # fmt: skip
    return prefix + encrypted + _digest(name, prefix + encrypted)


def decode_record(cipher: Cipher, name: str, record: bytes) -> RemoteRecord:
    """Decode a record, and verify its header against its own hashes and layout. Raises InvalidRecord."""
    if not _PREFIX.size + _CHECKSUM.size <= len(record) <= MAX_RECORD_BYTES or record[:4] != _MAGIC:
        raise InvalidRecord("it is no record")
    body = record[: -_CHECKSUM.size]
    if record[-_CHECKSUM.size :] != _digest(name, body):
        raise InvalidRecord("its record is damaged, or another one's")
    _, version, kind, parts, length, checksum, ends_at, mark = _PREFIX.unpack_from(body)
    if version != RECORD_VERSION or kind not in (payload_codec.RAW, payload_codec.PLANES):
        raise InvalidRecord("its record is of another version", corrupt=False)
    header = _open_header(cipher, name, body[_PREFIX.size :])
    # Compression never enlarges a payload; encryption enlarges it by the cipher's overhead at most.
    if not 1 <= parts <= MAX_PARTS or length > header.payload_bytes + cipher.max_overhead:
        raise InvalidRecord("its record has impossible sizes")
    if length < parts:  # ``max_part_bytes`` would be 0 or less, which a backend may read as no limit
        raise InvalidRecord("its record has empty parts")
    if ends_at >= _MAX_UNIX_SECONDS:
        raise InvalidRecord("its record ends in no time that there will be")
    return RemoteRecord(header, kind, parts, length, checksum, ends_at, mark)


def _open_header(cipher: Cipher, name: str, encrypted: bytes) -> ChunkHeader:
    try:
        plain = bytearray(cipher.plain_length(encrypted))
        cipher.decrypt(_PLACE_HEAD + name.encode(), memoryview(encrypted), memoryview(plain))
        header = ChunkHeader.FromString(bytes(plain))
    except (DecryptError, DecodeError, ValueError) as error:
        raise InvalidRecord("its header is not sealed with this key, or cannot be read", corrupt=False) from error
    if header.format_version != keys.FORMAT_VERSION:
        raise InvalidRecord("it is of another format", corrupt=False)
    if header.token_count != len(header.token_ids) or not hashes_match(header):
        raise InvalidRecord("it is another chunk than its hash names")
    try:
        size = layout_payload_bytes(header)
    except ValueError as error:
        raise InvalidRecord("it has an impossible layout") from error
    if size != header.payload_bytes or not 0 <= header.prefill_seconds < float("inf"):
        raise InvalidRecord("it has another size than its layout")
    return header


def _digest(name: str, body: bytes) -> bytes:
    return _CHECKSUM.pack(keys.checksum(name.encode() + b"\0" + body))
