"""Contents of a tier after a scan: complete chunks, and records to remove."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.durable_tier import LoadReport
from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.payload_reader import StoredEntry
from cache_daemon.durable.record_format import MINIMUM_VALUE_BYTES, CorruptRecord, decode_note, decrypt_header
from cache_daemon.durable.store_scan import StoreScan


@dataclass(frozen=True)
class TierContents:
    """A store's chunks, each with its ancestors, and the keys to remove."""

    headers: dict[bytes, ChunkHeader]
    entries: dict[bytes, StoredEntry]
    ticks: dict[bytes, int]
    notes: dict[bytes, bytes]
    useless: tuple[bytes, ...]
    useless_notes: tuple[bytes, ...]
    live_bytes: int
    last_order: int
    report: LoadReport


def read_contents(scan: StoreScan, cipher: Cipher) -> TierContents:
    """Decode every header and note; check the offset and length of every payload without reading it."""
    headers: dict[bytes, ChunkHeader] = {}
    corrupt = set(scan.broken_headers)
    for key, record in scan.records.items():
        place = scan.places.get(key)
        try:
            header = decrypt_header(cipher, key, record)
        except CorruptRecord:
            corrupt.add(key)
            continue
        if place is None or place[1] != max(record.stored_length, MINIMUM_VALUE_BYTES):
            corrupt.add(key)
        else:
            headers[key] = header
    kept = {key: headers[key] for key in with_all_ancestors(headers)}
    entries = {key: _entry(scan, key, header) for key, header in kept.items()}
    notes: dict[bytes, bytes] = {}
    useless_notes = list(scan.broken_notes)
    for name, stored in scan.notes.items():
        try:
            notes[name] = decode_note(cipher, name, stored)
        except CorruptRecord:
            useless_notes.append(name)
    useless = {*scan.records, *scan.places, *scan.ticks, *corrupt} - kept.keys()
    return TierContents(
        headers=kept,
        entries=entries,
        ticks=scan.ticks,
        notes=notes,
        useless=tuple(useless),
        useless_notes=tuple(useless_notes),
        live_bytes=sum(entry.stored_bytes for entry in entries.values()),
        last_order=max((record.order for record in scan.records.values()), default=0),
        report=LoadReport(len(corrupt), len(headers) - len(kept), len(useless_notes)),
    )


def with_all_ancestors(headers: Mapping[bytes, ChunkHeader]) -> list[bytes]:
    """Return the keys whose ancestors are all present, parents before children."""
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


def _entry(scan: StoreScan, key: bytes, header: ChunkHeader) -> StoredEntry:
    record = scan.records[key]
    return StoredEntry(
        scan.file,
        scan.places[key][0],
        record.stored_length,
        record.stored_checksum,
        record.codec,
        header.parent_prefix_hash,
        record.stored_bytes,
    )


def load_order(contents: TierContents) -> Iterator[tuple[bytes, ChunkHeader]]:
    """Yield chunks with headers, each chunk after its parent, and otherwise the least recently used chunk first."""
    children: dict[bytes, list[bytes]] = {}
    for key, header in contents.headers.items():
        if header.parent_prefix_hash != header.root:
            children.setdefault(header.parent_prefix_hash, []).append(key)
    ready = [
        (contents.ticks.get(key, 0), key)
        for key, header in contents.headers.items()
        if header.parent_prefix_hash == header.root
    ]
    heapq.heapify(ready)
    while ready:
        _, key = heapq.heappop(ready)
        yield key, contents.headers[key]
        for child in children.get(key, ()):
            heapq.heappush(ready, (contents.ticks.get(child, 0), child))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection, which would take a fifth of the loading time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
