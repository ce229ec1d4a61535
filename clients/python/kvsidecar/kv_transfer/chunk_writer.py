"""Stores an engine's blocks in the daemon: reserve, copy into staging, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvkernels.paged_gather import Integers

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.block_chunking import BlockChunking
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.kv_transfer.session import Session
from kvsidecar.kv_transfer.transport import Fill, transfer_timeout

# A long prompt is written in groups, so that its first chunks become visible before its last chunk is written. A group
# has at most this many chunks, and takes at most this share of the session's staging memory.
_MAX_GROUP_CHUNKS, _MAX_STAGING_SHARE = 32, 0.5
_ALIGNMENT = 4096


class StoreCancelled(Exception):
    """The engine needs its blocks back."""


@dataclass(frozen=True)
class StoredPrefix:
    """The stored prefix of a prompt: its number of tokens, and the prefix hash of its last chunk."""

    tokens: int = 0
    prefix_hash: bytes = b""


@dataclass(frozen=True)
class StoreResult:
    """Result of storing a prompt: the stored prefix, and counts of new and refused chunks."""

    prefix: StoredPrefix
    stored_chunks: int = 0
    stored_bytes: int = 0
    refused_chunks: int = 0


class ChunkWriter:
    """Stores prompts. For one thread.

    ``timeout`` (seconds) limits a call that transfers no payload.
    """

    def __init__(self, copier: BlockCopier, geometry: Geometry, chunk_tokens: int, timeout: float) -> None:
        self._copier, self._geometry = copier, geometry
        self._chunking, self._timeout = BlockChunking(chunk_tokens), timeout

    def store(
        self,
        session: Session,
        root: bytes,
        tokens: list[int],
        salt: bytes,
        slots: Integers,
        prefix: StoredPrefix,
        *,
        token_seconds: float = 0.0,
        after: Any = None,
        read_guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        hints: CacheHints = NO_HINTS,
    ) -> StoreResult:
        """Store the tokens after ``prefix`` from ``slots [len(tokens)]``.

        ``token_seconds`` is the prefill time of one token. ``after`` is the CUDA event after which the slots hold the
        tokens. The writer reads the cache only inside ``read_guard()``, one chunk at a time; ``read_guard`` raises
        StoreCancelled to stop the store. Raises StoreCancelled, grpc.RpcError and ValueError, after it has aborted the
        open reservations (if the daemon can be reached).
        """
        target = StoreTarget(session, root, salt, self._timeout, hints)
        source = _BlockSource(
            self, session.max_chunk_tokens, _StoreJob(tokens, slots, token_seconds, after, read_guard)
        )
        stored = store_chunks(target, source, prefix).prefix
        return StoreResult(stored, source.stored_chunks, source.stored_bytes, source.refused_chunks)

    def headers(self, job: _StoreJob, start: int, max_chunk_tokens: int) -> list[ChunkHeader]:
        """Return the headers of the chunks from ``start`` on."""
        headers = list[ChunkHeader]()
        for stop in self._chunking.boundaries(start, len(job.tokens), max_chunk_tokens):
            header = new_header(self._geometry, job.tokens[start:stop], start)
            header.prefill_seconds = job.token_seconds * (stop - start)
            headers.append(header)
            start = stop
        return headers

    def pack(self, job: _StoreJob, header: ChunkHeader, payload: memoryview) -> None:
        """Copy a chunk's blocks into its payload, inside the job's ``read_guard``."""
        start = header.start_position
        with job.read_guard():
            self._copier.pack(job.slots[start : start + header.token_count], header, payload, job.after)


@dataclass(frozen=True)
class _StoreJob:
    tokens: list[int]
    slots: Integers
    token_seconds: float
    after: Any
    read_guard: Callable[[], AbstractContextManager[None]]


class _BlockSource:
    """Chunks of an engine's blocks, and counters of the daemon's outcomes."""

    def __init__(self, writer: ChunkWriter, max_chunk_tokens: int, job: _StoreJob) -> None:
        self._writer, self._max_chunk_tokens, self._job = writer, max_chunk_tokens, job
        self.stored_chunks = self.stored_bytes = self.refused_chunks = 0

    def headers(self, start: int) -> list[ChunkHeader]:
        return self._writer.headers(self._job, start, self._max_chunk_tokens)

    def fill(self, header: ChunkHeader, payload: memoryview) -> None:
        self._writer.pack(self._job, header, payload)

    def before_group(self) -> None:
        pass

    def after_group(self, result: WriteResult) -> None:
        self.stored_chunks += sum(result.newly_stored)
        self.stored_bytes += result.new_bytes
        self.refused_chunks += len(result.stored) - result.num_leading_stored


@dataclass(frozen=True)
class StoreTarget:
    """A session, and the tenant whose chunks it stores.

    ``timeout`` (seconds) limits a call that transfers no payload.
    """

    session: Session
    root: bytes
    salt: bytes
    timeout: float
    hints: CacheHints = NO_HINTS


class ChunkSource(Protocol):
    """Chunks of one prompt, which ``store_chunks`` requests on its own thread."""

    def headers(self, start: int) -> list[ChunkHeader]:
        """Headers of the consecutive chunks from token ``start`` on."""
        ...

    def fill(self, header: ChunkHeader, payload: memoryview) -> None:
        """Write the payload of a chunk."""
        ...

    def before_group(self) -> None:
        """Called before a group is reserved; may wait."""
        ...

    def after_group(self, result: WriteResult) -> None:
        """Called after a group was committed."""
        ...


@dataclass(frozen=True)
class StoredChunks:
    """The stored prefix of a prompt, with and without its last chunk.

    ``before_last``, the prefix without the last chunk, is None if no chunk was stored.
    """

    prefix: StoredPrefix
    before_last: StoredPrefix | None = None


def store_chunks(
    target: StoreTarget, source: ChunkSource, prefix: StoredPrefix, can_restart: bool = True
) -> StoredChunks:
    """Store the chunks of a prompt after ``prefix``: reserve, fill, commit per group.

    Stops at the first chunk that the daemon refuses. If the last chunk of ``prefix`` was evicted or replaced meanwhile
    (PARENT_MISSING), it stores all chunks of the prompt again if ``can_restart``; otherwise it stores nothing. Raises
    the exceptions of ``source``, grpc.RpcError and ValueError, after it has aborted the open reservations.
    """
    stored = _store_after(target, source, prefix)
    if stored is None and can_restart:
        stored = _store_after(target, source, StoredPrefix())
    return stored or StoredChunks(StoredPrefix())


def _store_after(target: StoreTarget, source: ChunkSource, prefix: StoredPrefix) -> StoredChunks | None:
    """Store the chunks after ``prefix``; None if its last chunk is missing."""
    stored, first = StoredChunks(prefix), True
    for group, hashes in linked_groups(target.session, source.headers(prefix.tokens), prefix.prefix_hash, target.root):
        source.before_group()
        fill = partial(_fill, source, group)
        result = write(target.session, target.salt, group, fill, target.timeout, target.hints)
        if first and result.parent_missing and prefix.tokens:
            return None
        first = False
        source.after_group(result)
        for header, prefix_hash in zip(group[: result.num_leading_stored], hashes, strict=False):
            end = header.start_position + header.token_count
            stored = StoredChunks(StoredPrefix(end, prefix_hash), stored.prefix)
        if result.num_leading_stored < len(group):
            break
    return stored


def _fill(source: ChunkSource, group: list[ChunkHeader], i: int, payload: memoryview) -> None:
    source.fill(group[i], payload)


@dataclass(frozen=True)
class WriteResult:
    """For each chunk, in order: whether it is stored, and whether this call stored it.

    ``new_bytes`` is the number of payload bytes that this call stored.
    """

    stored: tuple[bool, ...]
    newly_stored: tuple[bool, ...]
    parent_missing: bool = False
    new_bytes: int = 0

    @property
    def num_leading_stored(self) -> int:
        """Number of stored chunks before the first missing chunk."""
        return self.stored.index(False) if False in self.stored else len(self.stored)


def write(
    session: Session, salt: bytes, headers: list[ChunkHeader], fill: Fill, timeout: float, hints: CacheHints = NO_HINTS
) -> WriteResult:
    """Reserve, fill and commit one group of chunks (see ``group_length``).

    ``timeout`` (seconds) limits a call that transfers no payload. ``hints`` apply to the chunks. Raises the exceptions
    of ``fill``, grpc.RpcError and ValueError, after it has aborted the reservations.
    """
    request = pb.ReserveRequest(session_id=session.id, tenant_salt=salt, headers=headers)
    hints.add_to(request)
    reserved = session.reserve(request, timeout * 4)
    granted = [(i, reservation) for i, reservation in enumerate(reserved) if reservation.reservation_id]
    try:
        items = _written_payloads(session, granted, fill, timeout * 10)
    except Exception:
        session.abort([reservation.reservation_id for _, reservation in granted], timeout)
        raise
    outcomes: dict[bytes, int] = {}
    if items:
        answer = session.commit(items, timeout * 10)
        outcomes = {item.reservation_id: o for item, o in zip(items, answer.outcomes, strict=True)}
    newly_stored = tuple(outcomes.get(r.reservation_id) == pb.COMMIT_OUTCOME_COMMITTED for r in reserved)
    stored = tuple(
        new or r.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED for new, r in zip(newly_stored, reserved, strict=True)
    )
    parent_missing = reserved[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING
    new_bytes = sum(header.payload_bytes for new, header in zip(newly_stored, headers, strict=True) if new)
    return WriteResult(stored, newly_stored, parent_missing, new_bytes)


def _written_payloads(
    session: Session, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float
) -> list[pb.CommitItem]:
    if not granted:
        return []
    size = sum(reservation.staging.size_bytes for _, reservation in granted)
    return session.transport.write(granted, fill, transfer_timeout(size, timeout))


def linked_groups(
    session: Session, headers: Sequence[ChunkHeader], parent: bytes, root: bytes
) -> Iterator[tuple[list[ChunkHeader], list[bytes]]]:
    """Split one prompt's consecutive chunks into groups; yield headers and prefix hashes.

    ``parent`` is the prefix hash of the chunk before them. At the prompt's start it is empty, and ``root`` replaces it.
    Sets the headers' parent hashes, group by group as the caller consumes them.
    """
    at = 0
    while at < len(headers):
        group, hashes = list(headers[at : at + _MAX_GROUP_CHUNKS]), list[bytes]()
        del group[group_length(session, group) :]
        for header in group:
            header.parent_prefix_hash = parent
            parent = keys.prefix_hash(parent or root, header.token_ids)
            hashes.append(parent)
        yield group, hashes
        at += len(group)


def group_length(session: Session, headers: list[ChunkHeader]) -> int:
    """Return the number of next chunks that form one group; at least 1."""
    room, count = session.transport.max_reserved_bytes * _MAX_STAGING_SHARE, 0
    for header in headers[:_MAX_GROUP_CHUNKS]:
        room -= -(-header.payload_bytes // _ALIGNMENT) * _ALIGNMENT
        if count and room < 0:
            break
        count += 1
    return count
