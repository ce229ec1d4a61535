"""What a durable tier is: the values that go in and out, the errors, and the promises every implementation keeps.

- Nothing wrong is ever read: a payload is SOUND only when its length and its XXH3-64 are those of the chunk.
- A store is closed under parents after every ``apply``: whoever finds a chunk finds its whole prefix.
- ``apply`` happens as a whole or not at all, whatever dies in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

PAGE_BYTES = 4096


class OutOfSpace(Exception):
    """The map or the disk is full. Nothing was changed; removals are still possible."""


class TierFailed(Exception):
    """The disk failed, or the store has to be opened again. Nothing was changed; trying again later may work."""


@dataclass(frozen=True)
class Put:
    """One chunk to store.

    ``header`` is complete: hashes, tokens, ``payload_bytes`` and the checksum of the raw payload. ``payload`` are the
    raw bytes, readable until ``apply`` returns. ``replaces`` are the prefix hashes that this chunk supersedes: they go
    in the same transaction, and only if the chunk is stored.
    """

    header: ChunkHeader
    payload: memoryview
    replaces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class WriteGroup:
    """One transaction: removals, then chunks in order, then notes, then recency.

    Whatever is removed takes its descendants along, unless they find a parent again in the same group.
    ``notes`` are small values by name; None deletes. ``used`` are ticks of last use by prefix hash; those of chunks
    that are not stored are ignored.
    """

    remove: tuple[bytes, ...] = ()
    put: tuple[Put, ...] = ()
    notes: Mapping[bytes, bytes | None] = field(default_factory=dict)
    used: Mapping[bytes, int] = field(default_factory=dict)


class PutOutcome(Enum):
    """What became of a chunk that was to be stored."""

    STORED = "stored"
    PARENT_MISSING = "parent_missing"
    OUT_OF_SPACE = "out_of_space"
    FAILED = "failed"
    CORRUPT = "corrupt"
    """The payload is not the one that its header describes."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class PutResult:
    """``stored_bytes`` is what the chunk costs of the budget; 0 unless it was stored."""

    outcome: PutOutcome
    stored_bytes: int = 0


class Loaded(NamedTuple):
    """A chunk found at start. ``last_use`` is the tick last given by ``used``, 0 when there was none."""

    header: ChunkHeader
    last_use: int
    stored_bytes: int


@dataclass(frozen=True)
class ReadJob:
    """A payload to read: ``target`` has exactly its length, ``checksum`` is that of its header."""

    prefix_hash: bytes
    target: memoryview
    checksum: int


class ReadResult(Enum):
    """What became of a read. ``target`` holds the payload only when SOUND, and anything otherwise."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    """The disk did not answer; the entry may be sound."""


@dataclass(frozen=True)
class Usage:
    """``live_bytes`` is the sum of the entries' ``stored_bytes``; ``file_bytes`` what the file takes."""

    file_bytes: int
    live_bytes: int
    entries: int


@dataclass(frozen=True)
class LoadReport:
    """What ``load`` dropped: entries whose bytes are damaged, and entries without their ancestors."""

    corrupt: int = 0
    orphaned: int = 0
    notes: int = 0


class DurableTier(Protocol):
    """See the module. ``load`` comes first, once. ``apply`` and ``compact`` may block for long and are called from one
    thread at a time; ``read`` from any number of threads."""

    def load(self) -> Iterable[Loaded]:
        """All chunks whose header is sound and whose ancestors are all there: parents before children, the longest
        unused first otherwise. The rest is removed from the store and counted in ``load_report``."""
        ...

    @property
    def load_report(self) -> LoadReport: ...

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """Reads several payloads at once, without the GIL. Never raises for one job's sake."""
        ...

    def apply(self, group: WriteGroup) -> list[PutResult]:
        """Writes a group atomically; one result per put: STORED, PARENT_MISSING or DAMAGED. Raises OutOfSpace and
        TierFailed."""
        ...

    def notes(self) -> dict[bytes, bytes]:
        """All notes that are sound."""
        ...

    def usage(self) -> Usage: ...

    def compact(self) -> None:
        """Gives the disk back what no chunk uses. Raises OutOfSpace, TierFailed."""
        ...

    def close(self) -> None: ...


def whole_pages(size_bytes: int) -> int:
    """Bytes on disk of a value that has pages of its own: a header of 16 bytes, then the value."""
    return -(-(16 + size_bytes) // PAGE_BYTES) * PAGE_BYTES
