"""Reference durable tier: it keeps all chunks in memory, and fulfils the whole contract of ``tier``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.durable_tier import (
    Loaded,
    LoadReport,
    OutOfSpace,
    Put,
    PutOutcome,
    PutResult,
    ReadJob,
    ReadResult,
    Usage,
    WriteGroup,
    whole_pages,
)


@dataclass(frozen=True)
class _Stored:
    header: ChunkHeader
    payload: bytes
    last_use: int = 0

    @property
    def stored_bytes(self) -> int:
        return whole_pages(len(self.payload))


class MemoryTier:
    """A ``DurableTier`` in memory. ``most_bytes`` is its capacity; 0 means no limit."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._stored: dict[bytes, _Stored] = {}
        self._notes: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    @property
    def load_report(self) -> LoadReport:
        return LoadReport()

    def load(self) -> Iterable[Loaded]:
        waiting = sorted(self._stored.values(), key=lambda stored: stored.last_use)
        given: set[bytes] = set()
        found: list[Loaded] = []
        while waiting:
            stored = next(s for s in waiting if s.header.parent_prefix_hash in given | {s.header.root})
            waiting.remove(stored)
            given.add(stored.header.prefix_hash)
            header = ChunkHeader()
            header.CopyFrom(stored.header)  # a copy, because the caller may change it
            found.append(Loaded(header, stored.last_use, stored.stored_bytes))
        return found

    def first_of(self, root: bytes) -> bytes | None:
        """Return the prefix hash of a first chunk of a tenant root; None if there is none."""
        return next((key for key, stored in self._stored.items() if stored.header.parent_prefix_hash == root), None)

    def header(self, prefix_hash: bytes) -> ChunkHeader | None:
        """Return the header of a stored chunk; None if the chunk is missing."""
        stored = self._stored.get(prefix_hash)
        return stored.header if stored is not None else None

    def stored_keys(self) -> list[bytes]:
        """Return the prefix hashes of all chunks, parents before children."""
        return [loaded.header.prefix_hash for loaded in self.load()]

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        return [self._read(job) for job in jobs]

    def _read(self, job: ReadJob) -> ReadResult:
        found = self._stored.get(job.prefix_hash)
        if found is None:
            return ReadResult.MISSING
        if len(found.payload) != len(job.target) or keys.checksum(found.payload) != job.checksum:
            return ReadResult.CORRUPT
        job.target[:] = found.payload
        return ReadResult.OK

    def apply(self, group: WriteGroup) -> list[PutResult]:
        with self._lock:
            stored = dict(self._stored)
            for key in group.remove:
                stored.pop(key, None)
            replaced: set[bytes] = set()
            accepted = [self._put(stored, put, replaced) for put in group.put]
            _drop_orphans(stored)
            if self._max_bytes and group.put and sum(s.stored_bytes for s in stored.values()) > self._max_bytes:
                raise OutOfSpace(f"only {self._max_bytes} bytes fit")
            for key, tick in group.used.items():
                if key in stored:
                    stored[key] = _Stored(stored[key].header, stored[key].payload, tick)
            self._stored = stored
            for name, value in group.notes.items():
                self._notes.pop(name, None)
                if value is not None:
                    self._notes[name] = value
            return [_result(put, done, stored, replaced) for put, done in zip(group.put, accepted, strict=True)]

    @staticmethod
    def _put(stored: dict[bytes, _Stored], put: Put, replaced: set[bytes]) -> PutOutcome:
        header, payload = put.header, bytes(put.payload)
        if len(payload) != header.payload_bytes or keys.checksum(payload) != header.checksum:
            return PutOutcome.CORRUPT
        if header.parent_prefix_hash != header.root and header.parent_prefix_hash not in stored:
            return PutOutcome.PARENT_MISSING
        for key in put.replaces:
            if key != header.prefix_hash:
                stored.pop(key, None)
                replaced.add(key)
        stored[header.prefix_hash] = _Stored(header, payload)
        return PutOutcome.STORED

    def notes(self) -> dict[bytes, bytes]:
        return dict(self._notes)

    def usage(self) -> Usage:
        size = sum(stored.stored_bytes for stored in self._stored.values())
        return Usage(size, size, len(self._stored))

    def compact(self) -> None:
        """Do nothing: there is no file to shrink."""

    def close(self) -> None:
        """Do nothing: there is no file to close."""


def _drop_orphans(stored: dict[bytes, _Stored]) -> None:
    while True:
        orphans = [
            key
            for key, found in stored.items()
            if found.header.parent_prefix_hash != found.header.root and found.header.parent_prefix_hash not in stored
        ]
        if not orphans:
            return
        for key in orphans:
            del stored[key]


def _result(put: Put, outcome: PutOutcome, stored: dict[bytes, _Stored], replaced: set[bytes]) -> PutResult:
    header = put.header
    found = stored.get(header.prefix_hash)
    if outcome is PutOutcome.STORED and found is not None:
        return PutResult(outcome, found.stored_bytes)
    if outcome is not PutOutcome.CORRUPT:
        has_parent = header.parent_prefix_hash == header.root or header.parent_prefix_hash in stored
        is_replaced = header.prefix_hash in replaced and has_parent
        outcome = PutOutcome.REPLACED if is_replaced else PutOutcome.PARENT_MISSING
    return PutResult(outcome)
