"""Durable tier interface: values, errors, and the guarantees of every implementation.

- A read never returns wrong bytes: a payload is OK only if its length and its XXH3-64 match the chunk's header.
- The store is closed under parents after every ``apply``: it contains the whole prefix of every stored chunk.
- ``apply`` is atomic, even if the process or the machine dies during it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

PAGE_BYTES = 4096


class OutOfSpace(Exception):
    """The map or the disk is full. Nothing changed; removals are still possible."""


class TierFailed(Exception):
    """The disk failed, or the store must be reopened. Nothing changed; a retry may succeed."""


@dataclass(frozen=True)
class Put:
    """One chunk to store.

    ``header`` is complete: hashes, tokens, ``payload_bytes`` and the checksum of the raw payload. ``payload`` holds the
    raw bytes, readable until ``apply`` returns. ``replaces`` are the prefix hashes that this chunk supersedes: they are
    removed in the same transaction, and only if the chunk is stored.
    """

    header: ChunkHeader
    payload: memoryview
    replaces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class WriteGroup:
    """One transaction: removals, then chunks in order, then notes, then recency.

    Removing a chunk removes its descendants, unless the same group stores a parent for them again. ``notes`` are small
    values by name; None deletes. ``used`` maps prefix hashes to ticks of last use; entries of missing chunks are
    ignored.
    """

    remove: tuple[bytes, ...] = ()
    put: tuple[Put, ...] = ()
    notes: Mapping[bytes, bytes | None] = field(default_factory=dict)
    used: Mapping[bytes, int] = field(default_factory=dict)


class PutOutcome(Enum):
    """Result of storing one chunk."""

    STORED = "stored"
    PARENT_MISSING = "parent_missing"
    REPLACED = "replaced"
    """A later chunk of the same group replaces it."""
    OUT_OF_SPACE = "out_of_space"
    FAILED = "failed"
    CORRUPT = "corrupt"
    """The payload is not the one that its header describes."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class PutResult:
    """Outcome of a put, with its cost.

    ``stored_bytes`` is the part of the budget that the chunk uses; 0 if it was not stored.
    """

    outcome: PutOutcome
    stored_bytes: int = 0


class Loaded(NamedTuple):
    """A chunk found at start. ``last_use`` is the last tick that ``used`` recorded, or 0."""

    header: ChunkHeader
    last_use: int
    stored_bytes: int


@dataclass(frozen=True)
class ReadJob:
    """A payload to read into ``target``, which has its length; ``checksum`` is from the chunk's header."""

    prefix_hash: bytes
    target: memoryview
    checksum: int


class ReadResult(Enum):
    """Result of a read. ``target`` holds the payload only when OK."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    """The disk did not answer; the entry may be intact."""


@dataclass(frozen=True)
class Usage:
    """Space in use: file size, sum of the entries' ``stored_bytes``, and number of entries."""

    file_bytes: int
    live_bytes: int
    entries: int


@dataclass(frozen=True)
class LoadReport:
    """Entries that ``load`` dropped: corrupt entries, and entries with missing ancestors."""

    corrupt: int = 0
    orphaned: int = 0
    notes: int = 0


class DurableTier(Protocol):
    """A store of chunks that outlives the process. The module's docstring states the guarantees.

    Call ``load`` first, once. ``apply`` and ``compact`` may block for long; one thread at a time may call them. Any
    number of threads may call ``read``.
    """

    def load(self) -> Iterable[Loaded]:
        """Return all chunks with an intact header and all ancestors.

        Parents come before their children; apart from that, the chunk that was unused for longest comes first. ``load``
        removes all other entries from the store and counts them in ``load_report``.
        """
        ...

    @property
    def load_report(self) -> LoadReport: ...

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """Read several payloads at once, without the GIL.

        The failure of one job is its result (MISSING, CORRUPT or FAILED) and raises no exception.
        """
        ...

    def apply(self, group: WriteGroup) -> list[PutResult]:
        """Write a group atomically; return one result per put.

        Outcomes are STORED, PARENT_MISSING, REPLACED or CORRUPT. Raises OutOfSpace and TierFailed.
        """
        ...

    def notes(self) -> dict[bytes, bytes]:
        """Return all intact notes."""
        ...

    def usage(self) -> Usage: ...

    def compact(self) -> None:
        """Return unused space to the disk. Raises OutOfSpace, TierFailed."""
        ...

    def close(self) -> None: ...


class ArchiveSource(Protocol):
    """Chunks that an archive is made of: a stopped daemon's tier, or a running daemon."""

    def stored_keys(self) -> list[bytes]:
        """Return the prefix hashes of all chunks, parents before children."""
        ...

    def header(self, prefix_hash: bytes) -> ChunkHeader | None:
        """Return a stored chunk's header; None when it is missing or corrupt. Raises OSError."""
        ...

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]: ...

    def notes(self) -> dict[bytes, bytes]:
        """Return all intact notes."""
        ...


class ArchivableTier(DurableTier, Protocol):
    """A durable tier with header lookup after ``load``, as archives need it."""

    def stored_keys(self) -> list[bytes]:
        """Return the prefix hashes of all chunks, parents before children."""
        ...

    def first_of(self, root: bytes) -> bytes | None:
        """Return the prefix hash of a first chunk of a tenant root; None when there is none."""
        ...

    def header(self, prefix_hash: bytes) -> ChunkHeader | None:
        """Return a stored chunk's header; None when it is missing or corrupt. Raises OSError."""
        ...


def whole_pages(size_bytes: int) -> int:
    """Return the disk bytes of a value that has its own pages, the first with a 16-byte header."""
    return -(-(16 + size_bytes) // PAGE_BYTES) * PAGE_BYTES
