"""A portable archive of stored chunks: one file, for baking a warm cache into an image.

::

    "KVSIDECAR-ARCHIVE" 0x00 uint16 2
    per chunk, parents first:
        "C" uint32 header length, uint64 payload length, uint64 expiry (Unix milliseconds; 0: none)
        uint64 XXH3-64 of expiry, header and payload
        ChunkHeader, payload
    "E" uint64 number of chunks, uint64 XXH3-64 of everything before this field

Integers are little-endian. Payloads are raw, even if the store compresses or encrypts them. An import verifies the
hashes of tokens and the checksums of payloads, and it checks every length before it allocates memory for it. It also
checks that every parent precedes its child and ends where the child begins, and that all chunks of a root, including
chunks already in the store, have the same layout. Expired chunks are neither exported nor imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash
from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS, MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest

from cache_daemon.durable.durable_tier import (
    ArchivableTier,
    ArchiveSource,
    DurableTier,
    Put,
    PutOutcome,
    ReadJob,
    ReadResult,
    WriteGroup,
)
from cache_daemon.durable.lineage import Lineage
from cache_daemon.durable.record_format import (
    expiries_of,
    hashes_match,
    is_valid_duration,
    layout_payload_bytes,
    merge_expiries,
)

_BEGIN = b"KVSIDECAR-ARCHIVE\0" + struct.pack("<H", 2)
_CHUNK = struct.Struct("<IQQQ")
_END = struct.Struct("<Q")
_UNTIL = struct.Struct("<Q")
_DIGEST = struct.Struct("<Q")
_MAX_HEADER_BYTES = 64 << 10
_GROUP_BYTES = 32 << 20
# Maximal TTL of a request.
_MAX_TTL_MS = MAX_TTL_SECONDS * 1000
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ArchiveSummary:
    """Result of an export or import.

    ``skipped`` counts chunks that were corrupt, expired, or had no parent.
    """

    chunks: int
    payload_bytes: int
    skipped: int = 0


def export_archive(
    source: ArchiveSource,
    out: Path,
    roots: frozenset[bytes] | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> ArchiveSummary:
    """Write the intact chunks of some tenant roots (None: of all) to ``out``.

    The file appears under its name only when it is complete. A symbolic link stays, and its target is written.
    ``clock`` returns Unix seconds. Raises OSError, and InvalidRequest if ``out`` is a folder, pipe or device.
    """
    names, ends, now = source.stored_keys(), expiries_of(source.notes()), clock() * 1000
    exported: set[bytes] = set()
    size = skipped = 0
    with _replacing(out) as file:
        writing = _Writing(file)
        writing.write(_BEGIN)
        for done, name in enumerate(names):
            if progress is not None:
                progress(done, len(names))
            header = source.header(name)
            if header is not None and roots is not None and header.root not in roots:
                continue
            end = ends.get(name, 0)
            over = 0 < end <= now
            if (
                header is None
                or over
                or not (header.parent_prefix_hash == header.root or header.parent_prefix_hash in exported)
            ):
                skipped += 1
                continue
            payload = bytearray(header.payload_bytes)
            if source.read([ReadJob(name, memoryview(payload), header.checksum)])[0] is not ReadResult.OK:
                skipped += 1
                continue
            writing.chunk(header.SerializeToString(), payload, end)
            exported.add(name)
            size += len(payload)
        writing.end(len(exported))
    if progress is not None:
        progress(len(names), len(names))
    return ArchiveSummary(len(exported), size, skipped)


def import_archive(
    tier: ArchivableTier,
    source: Path,
    max_payload_bytes: int = 1 << 30,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> ArchiveSummary:
    """Store an archive's chunks.

    A chunk that is already stored is not replaced, and counts as imported. Chunks that were stored before an error
    stay, since each chunk is checked separately. ``progress`` gets the bytes read and the file's length; ``clock``
    returns Unix seconds. Raises InvalidRequest when the file is no archive, is corrupt or contains chunks that may not
    be stored. Also raises OSError, OutOfSpace and TierFailed.
    """
    total = source.stat().st_size
    stored = size = skipped = 0
    known = frozenset(tier.stored_keys())
    group: list[Put] = []
    ends: list[tuple[bytes, int]] = []
    group_bytes = 0
    with source.open("rb") as file:
        for header, payload, end in _read_chunks(file, total, max_payload_bytes, Lineage(tier)):
            now = int(clock() * 1000)
            if 0 < end <= now:
                skipped += 1
                continue
            if header.prefix_hash in known:
                stored += 1
            else:
                group.append(Put(header, memoryview(payload)))
            ends.append((header.prefix_hash, min(end, now + _MAX_TTL_MS)))
            group_bytes += len(payload)
            if group_bytes >= _GROUP_BYTES:
                outcomes = _store(tier, group, merge_expiries(ends, known, tier.notes()))
                stored, skipped = stored + outcomes[0], skipped + outcomes[1]
                group, ends, group_bytes = [], [], 0
            size += len(payload)
            if progress is not None:
                progress(file.tell(), total)
        outcomes = _store(tier, group, merge_expiries(ends, known, tier.notes()))
    return ArchiveSummary(stored + outcomes[0], size, skipped + outcomes[1])


def _store(tier: DurableTier, group: list[Put], notes: dict[bytes, bytes | None]) -> tuple[int, int]:
    results = tier.apply(WriteGroup(put=tuple(group), notes=notes))
    stored = sum(result.outcome is PutOutcome.STORED for result in results)
    return stored, len(results) - stored


class _Writing:
    """Writes bytes and includes them in the digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, xxhash.xxh3_64()

    def write(self, data: bytes | bytearray) -> None:
        self._digest.update(data)
        self._file.write(data)

    def chunk(self, header: bytes, payload: bytearray, end: int) -> None:
        checksum = _checksum(end, header, payload)
        self.write(b"C" + _CHUNK.pack(len(header), len(payload), end, checksum))
        self.write(header)
        self.write(payload)

    def end(self, chunks: int) -> None:
        self.write(b"E" + _END.pack(chunks))
        self._file.write(_DIGEST.pack(self._digest.intdigest()))


def _checksum(end: int, header: bytes, payload: bytes | bytearray) -> int:
    digest = xxhash.xxh3_64(_UNTIL.pack(end))
    digest.update(header)
    digest.update(payload)
    return digest.intdigest()


class _Reading:
    """Reads exact lengths, never beyond the file. Raises InvalidRequest."""

    def __init__(self, file: BinaryIO, total: int) -> None:
        self._file, self._left, self._digest = file, total, xxhash.xxh3_64()

    def take(self, size: int) -> bytes:
        if size > self._left:
            raise InvalidRequest("the archive ends early; export it again")
        data = self._file.read(size)
        if len(data) != size:
            raise InvalidRequest("the archive ends early; export it again")
        self._left -= size
        self._digest.update(data)
        return data

    def finish(self) -> None:
        expected = self._digest.intdigest()
        if _DIGEST.unpack(self.take(_DIGEST.size))[0] != expected:
            raise InvalidRequest("the archive is damaged: its digest is another; export it again")
        if self._left:
            raise InvalidRequest(f"{self._left} bytes follow the archive's end")


def _read_chunks(
    file: BinaryIO, total: int, max_payload_bytes: int, lineage: Lineage
) -> Iterator[tuple[ChunkHeader, bytes, int]]:
    reading = _Reading(file, total)
    if total < len(_BEGIN) or reading.take(len(_BEGIN)) != _BEGIN:
        raise InvalidRequest("the file is no archive of this version (it must begin with KVSIDECAR-ARCHIVE 2)")
    seen = 0
    while (kind := reading.take(1)) == b"C":
        header_bytes, payload_bytes, end, checksum = _CHUNK.unpack(reading.take(_CHUNK.size))
        if header_bytes > _MAX_HEADER_BYTES:
            raise InvalidRequest(f"a header has {header_bytes} bytes; at most {_MAX_HEADER_BYTES} are allowed")
        if payload_bytes > max_payload_bytes:
            raise InvalidRequest(f"a payload has {payload_bytes} bytes; at most {max_payload_bytes} are allowed")
        raw = reading.take(header_bytes)
        payload = reading.take(payload_bytes)
        if _checksum(end, raw, payload) != checksum:
            raise InvalidRequest(f"chunk {seen} of the archive is damaged; export it again")
        header = _checked_header(raw, payload, seen)
        lineage.check(header, seen)
        seen += 1
        yield header, payload, end
    if kind != b"E" or _END.unpack(reading.take(_END.size))[0] != seen:
        raise InvalidRequest("the archive is damaged: its number of chunks is another; export it again")
    reading.finish()


def _checked_header(raw: bytes, payload: bytes, position: int) -> ChunkHeader:
    """Decode a header and verify its hashes and payload. Raises InvalidRequest."""
    try:
        header = ChunkHeader.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest(f"chunk {position} of the archive has no readable header") from error
    header.DiscardUnknownFields()
    hashes = (header.root, header.parent_prefix_hash, header.prefix_hash, header.content_hash)
    if any(len(value) != keys.HASH_BYTES for value in hashes) or not 1 <= len(header.token_ids) <= MAX_CHUNK_TOKENS:
        raise InvalidRequest(f"chunk {position} of the archive has impossible hashes or tokens")
    if not hashes_match(header):
        raise InvalidRequest(f"chunk {position} of the archive is not the one that its hash names")
    if header.format_version != keys.FORMAT_VERSION:
        raise InvalidRequest(
            f"chunk {position} of the archive has format_version {header.format_version}, not {keys.FORMAT_VERSION}"
        )
    if len(header.tenant) != keys.HASH_BYTES or header.token_count != len(header.token_ids):
        raise InvalidRequest(
            f"chunk {position} of the archive has a tenant of {len(header.tenant)} bytes and {header.token_count} as "
            f"its token_count; {keys.HASH_BYTES} and {len(header.token_ids)} are needed"
        )
    if not is_valid_duration(header.prefill_seconds):
        raise InvalidRequest(
            f"chunk {position} of the archive has {header.prefill_seconds} as its prefill_seconds; "
            "a number from 0 is needed"
        )
    if header.payload_bytes != len(payload) or keys.checksum(payload) != header.checksum:
        raise InvalidRequest(f"chunk {position} of the archive has another payload than its header says")
    try:
        expected = layout_payload_bytes(header)
    except ValueError as error:
        raise InvalidRequest(f"chunk {position} of the archive has an impossible layout: {error}") from error
    if expected != len(payload):
        raise InvalidRequest(f"chunk {position} of the archive has {len(payload)} bytes; its layout has {expected}")
    return header


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets its name when it is complete and on disk.

    The temporary name is random, because exporters in two containers may have the same process id.
    """
    path = _link_target(path)
    _remove_leftovers(path)
    temporary, file = _create_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _link_target(path: Path) -> Path:
    """Follow symbolic links to the file to write. Raises OSError, and InvalidRequest for a folder, pipe or device."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidRequest(f"{path} is no regular file; name a new file or an archive to replace")
    return path.resolve()


def _create_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Create a private, locked file beside ``path``.

    The lock tells a running export from a leftover, if the file system supports locks.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if temporary.exists():  # removed as a leftover before it was locked: try again
            return temporary, file
        file.close()


def _remove_leftovers(path: Path) -> None:
    """Remove unlocked temporary files beside ``path``, which dead exporters left. Inaccessible files stay."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
