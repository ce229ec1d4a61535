"""Reservations: staging memory granted for new chunks, the first half of the two-phase insert."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import (
    RESERVE_OUTCOME_ALREADY_STORED,
    RESERVE_OUTCOME_GRANTED,
    RESERVE_OUTCOME_IN_PROGRESS,
    RESERVE_OUTCOME_PARENT_MISSING,
    RESERVE_OUTCOME_STAGING_FULL,
    RESERVE_OUTCOME_TOO_LARGE,
    ReserveOutcome,
)
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of
from kvsidecar.errors import InvalidRequest

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.memory.fd_server import ID_BYTES
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.common_bytes import common_bytes
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.sessions import Reservation, Session
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager

# Maximal number of reservations that a report of a miss is compared with.
_MAX_COMPARED = 512


@dataclass(frozen=True)
class ReserveResult:
    """Outcome of one reservation."""

    outcome: ReserveOutcome.ValueType
    prefix_hash: bytes
    reservation_id: bytes = b""
    staged: Slot | None = None


class Reservations:
    """Open reservations of all sessions. Runs on the event loop."""

    def __init__(self, tiers: TierManager, inserter: ChunkInserter) -> None:
        self._tiers, self._inserter, self._hints = tiers, inserter, inserter.hints
        self._open: dict[bytes, tuple[Session, Reservation]] = {}

    # ---- reserve --------------------------------------------------------------------------------------------

    def reserve(
        self, session: Session, tenant_salt: bytes, headers: Sequence[ChunkHeader], hints: PromptHints = NO_HINTS
    ) -> list[ReserveResult]:
        """Reserve staging memory for new chunks, parents before children.

        ``hints`` apply to the new chunks and to the given chunks that are already stored. Raises InvalidRequest for a
        malformed header; then nothing is reserved.
        """
        root, tenant = keys.tenant_root(session.namespace, tenant_salt), keys.tenant_id(tenant_salt)
        for header in headers:
            self._check_header(header, session.geometry)
        account = self._tiers.accounts.account_of(tenant)
        visited: set[Chunk] = set()
        return [self._reserve_one(session, root, tenant, account, header, hints, visited) for header in headers]

    @staticmethod
    def _check_header(header: ChunkHeader, expected: Geometry) -> None:
        if len(header.token_ids) != header.token_count:
            raise InvalidRequest(f"token_count is {header.token_count}; {len(header.token_ids)} token_ids were sent")
        geometry = Geometry.of(header)
        if geometry != expected:
            raise InvalidRequest(f"the chunk's geometry is {geometry}, the session's namespace has {expected}")
        size = layout_of(header).size_bytes
        if size != header.payload_bytes:
            raise InvalidRequest(f"payload_bytes is {header.payload_bytes}; the header's layout has {size}")
        if not 0 <= header.prefill_seconds < float("inf"):
            raise InvalidRequest(f"prefill_seconds is {header.prefill_seconds}; a number from 0 is needed")

    def _reserve_one(
        self,
        session: Session,
        root: bytes,
        tenant: bytes,
        account: TenantAccount,
        header: ChunkHeader,
        hints: PromptHints,
        visited: set[Chunk],
    ) -> ReserveResult:
        parent = header.parent_prefix_hash or root
        ids = keys.token_bytes(header.token_ids)
        key, at = keys.prefix_hash(parent, ids), hints.at(header.start_position)
        present = self._tiers.index.get(key)
        if present is not None:
            self._hints.record_continuation(present, hints, visited)
            return ReserveResult(RESERVE_OUTCOME_ALREADY_STORED, key)
        if key in self._open:
            other = self._open[key][1]
            other.hints = other.hints.merge(at)
            self._hints.record_continuation(self._tiers.index.get(parent), hints, visited)
            return ReserveResult(RESERVE_OUTCOME_IN_PROGRESS, key)
        if not self._parent_is_known(session, root, parent, header.start_position):
            return ReserveResult(RESERVE_OUTCOME_PARENT_MISSING, key)
        assert session.staging is not None
        if self._too_large(session.staging.size_bytes, account, header.payload_bytes):
            return ReserveResult(RESERVE_OUTCOME_TOO_LARGE, key)
        staged = session.staging.allocate(header.payload_bytes)
        if staged is None:
            return ReserveResult(RESERVE_OUTCOME_STAGING_FULL, key)
        kept = ChunkHeader()
        kept.CopyFrom(header)
        kept.DiscardUnknownFields()
        kept.ClearField("token_ids")
        kept.root, kept.tenant, kept.parent_prefix_hash, kept.prefix_hash = root, tenant, parent, key
        kept.content_hash = keys.content_hash(root, ids)
        reservation_id = secrets.token_bytes(ID_BYTES)
        session.reservations[reservation_id] = made = Reservation(kept, ids, account, staged, at)
        self._open[key] = session, made
        self._hints.record_continuation(self._tiers.index.get(parent), hints, visited)
        return ReserveResult(RESERVE_OUTCOME_GRANTED, key, reservation_id, staged)

    def _too_large(self, staging_bytes: int, tenant: TenantAccount, size_bytes: int) -> bool:
        quota = tenant.limits.arena_bytes
        capacity = min(staging_bytes, self._tiers.arena.size_bytes)
        return footprint(size_bytes) > (capacity if quota is None else min(capacity, quota))

    def _parent_is_known(self, session: Session, root: bytes, parent: bytes, start: int) -> bool:
        """Return True if the parent ends at ``start`` and exists.

        The parent exists if it is the root, or a chunk that is stored or reserved by this session.
        """
        if parent == root or self._tiers.index.get(parent) is not None:
            return self._inserter.parent_is_live(root, parent, start)
        writer, reservation = self._open.get(parent, (None, None))
        if writer is not session or reservation is None:
            return False
        header = reservation.header
        return header.root == root and header.start_position + header.token_count == start

    # ---- abort and invalidation -----------------------------------------------------------------------------

    def abort(self, session: Session, reservation_ids: Iterable[bytes]) -> int:
        """End reservations; unknown ids are ignored. Returns the number of ended reservations."""
        aborted = 0
        for reservation_id in reservation_ids:
            reservation = session.reservations.pop(reservation_id, None)
            if reservation is not None:
                self.end(session, reservation)
                aborted += 1
        return aborted

    def invalidate(self, root: bytes, key: bytes, before: float = inf) -> None:
        """Invalidate reservations that a deletion concerns.

        These are the reservations of a tenant (with an empty root, of all tenants) that were made until ``before``
        (monotonic). With ``key``, only reservations of that chunk and its descendants are invalidated. A running commit
        does not insert the chunks of invalidated reservations. The same chunks can be reserved again at once.
        """
        leads: dict[bytes, bool] = {}
        concerned = {
            name: reservation
            for name, (_, reservation) in self._open.items()
            if root in (b"", reservation.header.root)
            and reservation.reserved_at <= before
            and (not key or self._is_descendant(name, key, leads))
        }
        for name, reservation in concerned.items():
            reservation.invalidated = True
            del self._open[name]

    def _is_descendant(self, name: bytes, key: bytes, known: dict[bytes, bool]) -> bool:
        """Return True if the path to a chunk contains ``key``; ``known`` caches results."""
        path = []
        at: bytes | None = name
        while at is not None and at != key and at not in known:
            path.append(at)
            at = self._parent_of(at)
        found = at == key or (at is not None and known[at])
        known.update(dict.fromkeys(path, found))
        return found

    def _parent_of(self, key: bytes) -> bytes | None:
        """Return the parent's hash of a reserved or indexed chunk; None for any other hash."""
        if key in self._open:
            return self._open[key][1].header.parent_prefix_hash
        chunk = self._tiers.index.get(key)
        return chunk.parent_key if chunk is not None else None

    def pending_tokens(self, parent_key: bytes, rest: bytes) -> int:
        """Return the length in tokens of the longest common prefix of ``rest`` and a reserved child of the parent."""
        newest = islice(reversed(self._open.values()), _MAX_COMPARED)
        shared = (common_bytes(r.ids, rest) for _, r in newest if r.header.parent_prefix_hash == parent_key)
        return max(shared, default=0) // keys.TOKEN_BYTES

    def end(self, session: Session, reservation: Reservation) -> None:
        """Free a reservation's staging memory, and its prefix hash unless invalidation freed that before."""
        key = reservation.header.prefix_hash
        if self._open.get(key, (None, None))[1] is reservation:
            del self._open[key]
        if session.staging is not None:
            session.staging.free(reservation.staged)

    @contextlib.contextmanager
    def scoped_reservation(
        self, session: Session, tenant_salt: bytes, header: ChunkHeader, hints: PromptHints = NO_HINTS
    ) -> Iterator[ReserveResult]:
        """Reserve one chunk while a ``with`` block runs; then abort the reservation unless it was committed."""
        reserved = self.reserve(session, tenant_salt, [header], hints)[0]
        try:
            yield reserved
        finally:
            self.abort(session, [reserved.reservation_id])
