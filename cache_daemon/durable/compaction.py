"""Compaction: copies the intact records of a store into a new data file. Repairs use it, too.

When the new file is complete and on disk, one rename gives it the name of the old file. A crash at any point loses no
data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.lmdb_env import LmdbEnvironment
from cache_daemon.durable.record_format import (
    HEADERS,
    MINIMUM_VALUE_BYTES,
    NOTES,
    PAYLOADS,
    RECENCY,
    CorruptRecord,
    decode_note,
    decrypt_header,
    encode_record,
    encode_tick,
)
from cache_daemon.durable.store_dir import StoreDir
from cache_daemon.durable.store_scan import StoreScan
from cache_daemon.durable.tier_contents import with_all_ancestors

_TRANSACTION_BYTES = 32 << 20
_MAP_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class RebuildReport:
    """Result of a rebuild. ``problems`` has the first ten problems of the scan."""

    chunks: int
    notes: int
    lost: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    kept_as: Path | None = None


def payload_is_intact(scan: StoreScan, key: bytes) -> bool:
    """Return True when a chunk's stored payload matches its checksum. Raises OSError."""
    record, place = scan.records[key], scan.places.get(key)
    if place is None or place[1] != max(record.stored_length, MINIMUM_VALUE_BYTES):
        return False
    stored = bytearray(record.stored_length)
    return scan.file.read_into(memoryview(stored), place[0]) and keys.checksum(stored) == record.stored_checksum


def _readable_headers(scan: StoreScan, cipher: Cipher, lost: Counter[str]) -> dict[bytes, ChunkHeader]:
    """Return the headers that can be decoded, in the order of storing."""
    found = {}
    for key, record in sorted(scan.records.items(), key=lambda item: item[1].order):
        try:
            found[key] = decrypt_header(cipher, key, record)
        except CorruptRecord:
            lost["headers"] += 1
    return found


def rebuild(folder: StoreDir, scan: StoreScan, cipher: Cipher, keep_damaged: bool) -> RebuildReport:
    """Replace the data file by a new file with the intact records.

    Raises OutOfSpace, TierFailed, OSError.
    """
    lost: Counter[str] = Counter()
    if scan.broken_headers:
        lost["headers"] += len(scan.broken_headers)
    headers = _readable_headers(scan, cipher, lost)
    for key in list(headers):
        if not payload_is_intact(scan, key):
            lost["payloads"] += 1
            del headers[key]
    kept = with_all_ancestors(headers)
    if len(headers) > len(kept):
        lost["orphans"] += len(headers) - len(kept)
    notes = _sound_notes(scan, cipher, lost)
    with folder.new_data_folder() as new:
        _write(new, scan, cipher, kept, notes)
        kept_as = folder.keep_damaged() if keep_damaged else None
        folder.install_rebuilt()
    return RebuildReport(len(kept), len(notes), dict(lost), tuple(scan.problems[:10]), kept_as)


def _sound_notes(scan: StoreScan, cipher: Cipher, lost: Counter[str]) -> dict[bytes, bytes]:
    notes = {}
    for name, stored in scan.notes.items():
        try:
            decode_note(cipher, name, stored)
        except CorruptRecord:
            lost["notes"] += 1
        else:
            notes[name] = stored
    if scan.broken_notes:
        lost["notes"] += len(scan.broken_notes)
    return notes


def _write(folder: Path, scan: StoreScan, cipher: Cipher, kept: list[bytes], notes: Mapping[bytes, bytes]) -> None:
    """Write a complete data file to an empty folder and flush it."""
    size = sum(scan.records[key].stored_bytes for key in kept) + sum(map(len, notes.values())) * 2
    environment = LmdbEnvironment(folder, size * 5 // 4 + _MAP_SLACK_BYTES, sync=False)
    try:
        environment.initialise(cipher)
        for group in _groups(kept, scan):
            with environment.transaction() as txn:
                for key in group:
                    record = scan.records[key]
                    stored = scan.file.read(scan.places[key][0], max(record.stored_length, MINIMUM_VALUE_BYTES))
                    txn.put(HEADERS, key, encode_record(key, record))
                    txn.put(PAYLOADS, key, stored)
                    if key in scan.ticks:
                        txn.put(RECENCY, key, encode_tick(key, scan.ticks[key]))
        with environment.transaction() as txn:
            for name, stored in notes.items():
                txn.put(NOTES, name, stored)
        environment.sync()
    finally:
        environment.close()


def _groups(kept: Iterable[bytes], scan: StoreScan) -> Iterable[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for key in kept:
        group.append(key)
        size += scan.records[key].stored_bytes
        if size >= _TRANSACTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
