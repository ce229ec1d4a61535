"""Writes what is sound of a data file into a new one, and puts that in its place: repair and compaction alike.

Nothing is lost by dying at any point: the new file takes the old one's name, in one step, when it is complete and on
disk. Only ``pread`` touches the old file, so no damage in it can end the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.encryption import Seal
from cache_daemon.durable.lmdb_env import Environment
from cache_daemon.durable.record_format import (
    HEADERS,
    MINIMUM_VALUE_BYTES,
    NOTES,
    PAYLOADS,
    RECENCY,
    Unsound,
    decode_note,
    encode_record,
    encode_tick,
    open_header,
)
from cache_daemon.durable.store_dir import StoreFolder
from cache_daemon.durable.survey import OtherVersion, Survey

_TRANSACTION_BYTES = 32 << 20
_MAP_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild saved and lost. ``reasons`` are what was found broken, at most ten of them."""

    chunks: int
    notes: int
    lost: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    kept_as: Path | None = None


def payload_is_sound(survey: Survey, key: bytes) -> bool:
    """Whether a chunk's stored payload is there and the one that was written. Raises OSError."""
    record, place = survey.records[key], survey.places.get(key)
    if place is None or place[1] != max(record.stored_length, MINIMUM_VALUE_BYTES):
        return False
    stored = bytearray(record.stored_length)
    return survey.file.read_into(memoryview(stored), place[0]) and keys.checksum(stored) == record.stored_checksum


def closed(headers: Mapping[bytes, ChunkHeader]) -> list[bytes]:
    """The keys whose ancestors are all there, parents before children."""
    children: dict[bytes, list[bytes]] = {}
    ready: list[bytes] = []
    for key, header in headers.items():
        if header.parent_prefix_hash == header.root:
            ready.append(key)
        else:
            children.setdefault(header.parent_prefix_hash, []).append(key)
    for key in ready:
        ready += children.pop(key, ())
    return ready


def sound_headers(survey: Survey, seal: Seal, lost: Counter[str]) -> dict[bytes, ChunkHeader]:
    """The headers that can be opened, in the order in which they were stored."""
    found = {}
    for key, record in sorted(survey.records.items(), key=lambda item: item[1].order):
        try:
            found[key] = open_header(seal, key, record)
        except Unsound:
            lost["headers"] += 1
    return found


def rebuild(folder: StoreFolder, survey: Survey, seal: Seal, keep_damaged: bool) -> Rebuilt:
    """Replaces the data file by a new one with what is sound. Raises NoRoom, TierFailed, OSError."""
    lost: Counter[str] = Counter()
    if survey.broken_headers:
        lost["headers"] += len(survey.broken_headers)
    headers = sound_headers(survey, seal, lost)
    for key in list(headers):
        if not payload_is_sound(survey, key):
            lost["payloads"] += 1
            del headers[key]
    kept = closed(headers)
    if len(headers) > len(kept):
        lost["orphans"] += len(headers) - len(kept)
    notes = _sound_notes(survey, seal, lost)
    _write(folder, survey, seal, kept, notes)
    kept_as = folder.keep_damaged() if keep_damaged else None
    folder.install_rebuilt()
    return Rebuilt(len(kept), len(notes), dict(lost), tuple(survey.problems[:10]), kept_as)


def _sound_notes(survey: Survey, seal: Seal, lost: Counter[str]) -> dict[bytes, bytes]:
    notes = {}
    for name, stored in survey.notes.items():
        try:
            decode_note(seal, name, stored)
        except Unsound:
            lost["notes"] += 1
        else:
            notes[name] = stored
    if survey.broken_notes:
        lost["notes"] += len(survey.broken_notes)
    return notes


def _write(folder: StoreFolder, survey: Survey, seal: Seal, kept: list[bytes], notes: Mapping[bytes, bytes]) -> None:
    """A complete data file in ``rebuild/``, on disk."""
    size = sum(survey.records[key].stored_bytes for key in kept) + sum(map(len, notes.values())) * 2
    environment = Environment(folder.new_data_folder(), size * 5 // 4 + _MAP_SLACK_BYTES, sync=False)
    try:
        environment.initialise(seal)
        for group in _groups(kept, survey):
            with environment.transaction() as txn:
                for key in group:
                    record = survey.records[key]
                    stored = survey.file.read(survey.places[key][0], max(record.stored_length, MINIMUM_VALUE_BYTES))
                    txn.put(HEADERS, key, encode_record(key, record))
                    txn.put(PAYLOADS, key, stored)
                    if key in survey.ticks:
                        txn.put(RECENCY, key, encode_tick(key, survey.ticks[key]))
        with environment.transaction() as txn:
            for name, stored in notes.items():
                txn.put(NOTES, name, stored)
        environment.sync()
    finally:
        environment.close()


def _groups(kept: Iterable[bytes], survey: Survey) -> Iterable[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for key in kept:
        group.append(key)
        size += survey.records[key].stored_bytes
        if size >= _TRANSACTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def check_key(folder: Path, survey: Survey, seal: Seal) -> None:
    """Raises StoreUnavailable when a store has another key, or one where none is given, or none where one is."""
    check = survey.key_check
    if not check or seal.knows(check):
        return
    if check == b"none":
        text = "is not encrypted, but a key is given; start without the key, or choose another --store"
    elif not seal.overhead:
        text = "is encrypted; give its key, choose another --store, or remove the folder"
    else:
        text = "is encrypted with another key; give that key, choose another --store, or remove the folder"
    raise StoreUnavailable(f"the store in {folder} {text}")


def other_version(folder: Path, error: OtherVersion) -> StoreUnavailable:
    return StoreUnavailable(
        f"the store in {folder} {error}, this daemon needs version '2'; remove the folder or choose another --store"
    )
