"""Reserve → copy into staging → commit: from an engine's blocks to the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from kvkernels.paged_gather import Integers

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.block_chunking import Cutting
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.session import Session
from kvsidecar.kv_transfer.transport import Fill, carrying_seconds

# Chunks are written in groups of at most this many, so that a long prompt does not wait for its last chunk, and of at
# most this share of staging.
_GROUP, _STAGING_SHARE = 32, 0.5
_ALIGNMENT = 4096


class Cancelled(Exception):
    """The engine wants its blocks back."""


@dataclass(frozen=True)
class Prefix:
    """What is stored already: tokens that end where a chunk ends, and that chunk's prefix hash."""

    tokens: int = 0
    prefix_hash: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt: its leading tokens that are stored now, and how many chunks were new or refused."""

    prefix: Prefix
    stored_chunks: int = 0
    refused_chunks: int = 0


class Writer:
    """Stores prompts. For one thread. ``timeout`` is in seconds, for a call that moves nothing."""

    def __init__(self, copier: BlockCopier, geometry: Geometry, chunk_tokens: int, timeout: float) -> None:
        self._copier, self._geometry = copier, geometry
        self._cutting, self._timeout = Cutting(chunk_tokens), timeout

    def store(
        self,
        session: Session,
        root: bytes,
        tokens: list[int],
        salt: bytes,
        slots: Integers,
        prefix: Prefix,
        *,
        token_seconds: float = 0.0,
        after: Any = None,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Outcome:
        """Stores the tokens after ``prefix``, which lie at ``slots [len(tokens)]``.

        ``token_seconds`` is what computing a token took, ``after`` the CUDA event after which the slots hold them. The
        cache is read inside ``turn()`` and nowhere else, a chunk at a time; to end it all, ``turn`` raises Cancelled.
        Raises that, grpc.RpcError and ValueError; what was reserved is given back first, if the daemon is there.
        """
        job = _Job(session, root, tokens, salt, slots, token_seconds, after, turn)
        outcome = self._store_from(job, prefix)
        if outcome is None:  # the parent was evicted or superseded meanwhile: the engine still has it all
            outcome = self._store_from(job, Prefix())
        return outcome or Outcome(Prefix())

    def _store_from(self, job: _Job, prefix: Prefix) -> Outcome | None:
        """Stores what comes after ``prefix``; None when its last chunk is gone."""
        headers, outcome, first = self._headers(job, prefix.tokens), Outcome(prefix), True
        for group, hashes in linked_groups(job.session, headers, prefix.prefix_hash, job.root):
            written = write(job.session, job.salt, group, self._filler(job, group), self._timeout)
            if first and written.parent_missing and prefix.tokens:
                return None
            first = False
            there, fresh = written.leading, sum(written.fresh)
            if there:
                tokens = outcome.prefix.tokens + sum(h.token_count for h in group[:there])
                outcome = Outcome(Prefix(tokens, hashes[there - 1]), outcome.stored_chunks, outcome.refused_chunks)
            refused = len(group) - there
            outcome = Outcome(outcome.prefix, outcome.stored_chunks + fresh, outcome.refused_chunks + refused)
            if refused:
                break
        return outcome

    def _headers(self, job: _Job, start: int) -> list[ChunkHeader]:
        """Headers of the chunks from ``start`` on; they end at multiples of the chunk length, and with the tokens."""
        headers = list[ChunkHeader]()
        for stop in self._cutting.ends(start, len(job.tokens), job.session.max_chunk_tokens):
            header = new_header(self._geometry, job.tokens[start:stop], start)
            header.prefill_seconds = job.token_seconds * (stop - start)
            headers.append(header)
            start = stop
        return headers

    def _filler(self, job: _Job, headers: list[ChunkHeader]) -> Fill:
        def fill(i: int, payload: memoryview) -> None:
            start = headers[i].start_position
            with job.turn():
                self._copier.pack(job.slots[start : start + headers[i].token_count], headers[i], payload, job.after)

        return fill


@dataclass(frozen=True)
class _Job:
    session: Session
    root: bytes
    tokens: list[int]
    salt: bytes
    slots: Integers
    token_seconds: float
    after: Any
    turn: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Written:
    """What became of some chunks, in their order: whether each is stored now, and whether it was not before."""

    there: tuple[bool, ...]
    fresh: tuple[bool, ...]
    parent_missing: bool = False

    @property
    def leading(self) -> int:
        """How many there are before the first that is not stored."""
        return self.there.index(False) if False in self.there else len(self.there)


def write(
    session: Session, salt: bytes, headers: list[ChunkHeader], fill: Fill, timeout: float, ttl_seconds: int = 0
) -> Written:
    """Reserves, fills and commits as many chunks as ``group_length`` allows. ``timeout`` is in seconds, for a call that
    moves nothing; ``ttl_seconds`` says how long they are kept, 0 for as long as there is room. Raises what ``fill``
    raises, grpc.RpcError and ValueError; what was reserved is given back first."""
    request = pb.ReserveRequest(session_id=session.id, tenant_salt=salt, headers=headers, ttl_seconds=ttl_seconds)
    reserved = session.reserve(request, timeout * 4)
    granted = [(i, reservation) for i, reservation in enumerate(reserved) if reservation.reservation_id]
    try:
        items = _carried(session, granted, fill, timeout * 10)
    except Exception:
        session.give_up([reservation.reservation_id for _, reservation in granted], timeout)
        raise
    outcomes: dict[bytes, int] = {}
    if items:
        answer = session.commit(items, timeout * 10)
        outcomes = {item.reservation_id: o for item, o in zip(items, answer.outcomes, strict=True)}
    fresh = tuple(outcomes.get(r.reservation_id) == pb.COMMIT_OUTCOME_COMMITTED for r in reserved)
    there = tuple(new or r.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED for new, r in zip(fresh, reserved, strict=True))
    return Written(there, fresh, reserved[0].outcome == pb.RESERVE_OUTCOME_PARENT_MISSING)


def _carried(
    session: Session, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float
) -> list[pb.CommitItem]:
    if not granted:
        return []
    size = sum(reservation.staging.size_bytes for _, reservation in granted)
    return session.carrier.write(granted, fill, carrying_seconds(size, timeout))


def linked_groups(
    session: Session, headers: Sequence[ChunkHeader], parent: bytes, root: bytes
) -> Iterator[tuple[list[ChunkHeader], list[bytes]]]:
    """Headers of one prompt's neighbouring chunks as groups that are written together, with their prefix hashes.
    ``parent``, of the chunk before them, is empty at the prompt's start, where ``root`` stands for it. Fills in the
    headers' parents, of a group when it is asked for."""
    at = 0
    while at < len(headers):
        group, hashes = list(headers[at : at + _GROUP]), list[bytes]()
        del group[group_length(session, group) :]
        for header in group:
            header.parent_prefix_hash = parent
            parent = keys.prefix_hash(parent or root, header.token_ids)
            hashes.append(parent)
        yield group, hashes
        at += len(group)


def group_length(session: Session, headers: list[ChunkHeader]) -> int:
    """How many of the next chunks are written together: at least one."""
    room, count = session.carrier.room_bytes * _STAGING_SHARE, 0
    for header in headers[:_GROUP]:
        room -= -(-header.payload_bytes // _ALIGNMENT) * _ALIGNMENT
        if count and room < 0:
            break
        count += 1
    return count
