"""Two-phase commit of new chunks: reserve, commit, abort.

A worker writes into its session's staging memory. Commit copies from there into the arena, verifies the copy and
inserts it. So no write of a worker, early or late, changes a byte that a reader sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import (
    COMMIT_OUTCOME_ARENA_FULL,
    COMMIT_OUTCOME_CHECKSUM_MISMATCH,
    COMMIT_OUTCOME_COMMITTED,
    COMMIT_OUTCOME_PARENT_MISSING,
    COMMIT_OUTCOME_QUOTA_EXCEEDED,
    RESERVE_OUTCOME_ALREADY_STORED,
    RESERVE_OUTCOME_GRANTED,
    RESERVE_OUTCOME_IN_PROGRESS,
    RESERVE_OUTCOME_PARENT_MISSING,
    RESERVE_OUTCOME_STAGING_FULL,
    RESERVE_OUTCOME_TOO_LARGE,
    CommitOutcome,
    ReserveOutcome,
)
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of
from kvsidecar.errors import InvalidRequest, StaleEpoch, UnknownLease

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.memory.fd_server import ID_BYTES
from cache_daemon.store.common_bytes import common_bytes
from cache_daemon.store.insertion import ChunkInserter, Insertion, InsertOutcome, NewChunk
from cache_daemon.store.loss_cause import LossCause, LostChunk
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.sessions import Reservation, Session
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tenant_accounts import TenantAccount
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# Bytes and chunks of one piece of work on the copy threads.
_COPY_BYTES, _COPY_CHUNKS = 16 << 20, 32
# Longest wait of a commit for a full arena, which may be full of chunks that are being written to disk.
_ARENA_WAIT_SECONDS, _ARENA_POLL_SECONDS = 2.0, 0.25
_RECENT_USE_SECONDS = 30.0
# Reservations that a report of a miss is compared with.
_MAX_COMPARED = 512

_OUTCOMES = {
    InsertOutcome.INSERTED: COMMIT_OUTCOME_COMMITTED,
    InsertOutcome.PRESENT: COMMIT_OUTCOME_COMMITTED,  # another writer was faster
    InsertOutcome.PARENT_MISSING: COMMIT_OUTCOME_PARENT_MISSING,
    InsertOutcome.DELETED: COMMIT_OUTCOME_PARENT_MISSING,
    InsertOutcome.ENTRIES_EXCEEDED: COMMIT_OUTCOME_QUOTA_EXCEEDED,
}


@dataclass(frozen=True)
class ReserveResult:
    """Outcome of one reservation."""

    outcome: ReserveOutcome.ValueType
    prefix_hash: bytes
    reservation_id: bytes = b""
    staged: Slot | None = None


@dataclass(frozen=True)
class _Copy:
    reservation: Reservation
    slot: Slot
    checksum: int


class TwoPhaseCommit:
    """Reservations of all sessions, and the running commits. Runs on the event loop."""

    def __init__(
        self,
        tiers: TierManager,
        inserter: ChunkInserter,
        epoch: int,
        threads: StoreThreads,
    ) -> None:
        self._tiers, self._inserter = tiers, inserter
        self._persistence, self._hints = inserter.persistence, inserter.hints
        self._epoch, self._threads = epoch, threads
        self._open_reservations: dict[bytes, tuple[Session, Reservation]] = {}
        self._running: set[asyncio.Future[list[CommitOutcome.ValueType]]] = set()

    # ---- reserve --------------------------------------------------------------------------------------------

    def reserve(
        self, session: Session, tenant_salt: bytes, headers: Sequence[ChunkHeader], hints: PromptHints = NO_HINTS
    ) -> list[ReserveResult]:
        """Reserve staging memory for new chunks, parents before children.

        ``hints`` apply to them and to chunks already stored. Raises InvalidRequest for a malformed header, with nothing
        reserved.
        """
        root, tenant = keys.tenant_root(session.namespace, tenant_salt), keys.tenant_id(tenant_salt)
        for header in headers:
            self._check_header(header, session.geometry)
        account = self._tiers.accounts.account_of(tenant)
        return [self._reserve_one(session, root, tenant, account, header, hints) for header in headers]

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
    ) -> ReserveResult:
        parent = header.parent_prefix_hash or root
        ids = keys.token_bytes(header.token_ids)
        key, at = keys.prefix_hash(parent, ids), hints.at(header.start_position)
        present = self._tiers.index.get(key)
        if present is not None:
            self._hints.record_use(present, at)
            self._hints.record_continuation(self._tiers.parent_of(present), at)
            return ReserveResult(RESERVE_OUTCOME_ALREADY_STORED, key)
        if key in self._open_reservations:
            other = self._open_reservations[key][1]
            other.hints = other.hints.merge(at)
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
        self._open_reservations[key] = session, made
        self._hints.record_continuation(self._tiers.index.get(parent), at)
        return ReserveResult(RESERVE_OUTCOME_GRANTED, key, reservation_id, staged)

    def _too_large(self, staging_bytes: int, tenant: TenantAccount, size_bytes: int) -> bool:
        quota = tenant.limits.arena_bytes
        capacity = min(staging_bytes, self._tiers.arena.size_bytes)
        return footprint(size_bytes) > (capacity if quota is None else min(capacity, quota))

    def _parent_is_known(self, session: Session, root: bytes, parent: bytes, start: int) -> bool:
        """Return True if the parent ends at ``start`` and exists.

        It exists if it is the root, stored, or reserved by this session.
        """
        if parent == root or self._tiers.index.get(parent) is not None:
            return self._inserter.parent_is_live(root, parent, start)
        writer, reservation = self._open_reservations.get(parent, (None, None))
        if writer is not session or reservation is None:
            return False
        header = reservation.header
        return header.root == root and header.start_position + header.token_count == start

    # ---- commit ---------------------------------------------------------------------------------------------

    async def commit(
        self, session: Session, epoch: int, items: Sequence[tuple[bytes, int]]
    ) -> list[CommitOutcome.ValueType]:
        """Make reserved chunks visible.

        ``items`` are ``(reservation id, checksum)``, parents before children. Raises StaleEpoch, UnknownLease and
        InvalidRequest with nothing changed; otherwise all named reservations have ended, and each item has its outcome.
        Cancelling the caller does not stop the commit.
        """
        if epoch != self._epoch:
            raise StaleEpoch(f"the reservations are of epoch {epoch}, the daemon's is {self._epoch}; attach again")
        if len({reservation_id for reservation_id, _ in items}) < len(items):
            raise InvalidRequest("a reservation is named twice in one Commit; name each once")
        for reservation_id, _ in items:
            if reservation_id not in session.reservations:
                raise UnknownLease("the reservation is not one of this session's; reserve the chunk again")
        items_taken = [(session.reservations.pop(reservation_id), checksum) for reservation_id, checksum in items]
        session.committing += 1
        running = asyncio.ensure_future(self._commit(session, items_taken))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.shield(running)

    async def wait_idle(self) -> None:
        """Wait for running commits, also those whose caller was cancelled."""
        while self._running:
            await asyncio.wait(self._running)

    async def _commit(
        self, session: Session, items_taken: list[tuple[Reservation, int]]
    ) -> list[CommitOutcome.ValueType]:
        outcomes: list[CommitOutcome.ValueType] = []
        wait_seconds, yield_timer = _ARENA_WAIT_SECONDS, YieldTimer()
        try:
            with self._inserter.begin(r.header.parent_prefix_hash for r, _ in items_taken) as insertion:
                while len(outcomes) < len(items_taken):
                    copies, refusal, wait_seconds = await self._allocate_slots(
                        items_taken[len(outcomes) :], wait_seconds
                    )
                    is_valid = await self._copy_and_verify(session, copies)
                    outcomes += [self._insert(insertion, c, ok) for c, ok in zip(copies, is_valid, strict=True)]
                    await yield_timer.maybe_yield()
                    if refusal is not None and len(outcomes) < len(items_taken):
                        self._record_refusal(items_taken[len(outcomes)][0], refusal)
                        outcomes.append(refusal)
        finally:
            for reservation, _ in items_taken:
                self._end_reservation(session, reservation)
            session.committing -= 1
            session.close_staging()
        self._touch([r for (r, _), o in zip(items_taken, outcomes, strict=True) if o == COMMIT_OUTCOME_COMMITTED])
        return outcomes

    def _record_refusal(self, refused: Reservation, refusal: CommitOutcome.ValueType) -> None:
        over = refusal == COMMIT_OUTCOME_QUOTA_EXCEEDED
        cause, header = LossCause.ARENA_QUOTA if over else LossCause.ARENA_FULL, refused.header
        lost = LostChunk(refused.tenant, header.parent_prefix_hash, header.start_position, refused.ids, cause)
        self._tiers.record_loss(lost)

    async def _allocate_slots(
        self, items_taken: Sequence[tuple[Reservation, int]], wait_seconds: float
    ) -> tuple[list[_Copy], CommitOutcome.ValueType | None, float]:
        """Allocate slots for the next copy.

        Also returns the refusal of the chunk after them, and the remaining waiting time.
        """
        copies: list[_Copy] = []
        size, evictor = 0, self._inserter.arena_evictor
        for reservation, checksum in items_taken:
            header, tenant = reservation.header, reservation.tenant
            if len(copies) == _COPY_CHUNKS or (size and size + header.payload_bytes > _COPY_BYTES):
                break
            slot = evictor.allocate(header.payload_bytes, tenant)
            while slot is None and not copies and wait_seconds > 0 and self._persistence is not None:
                if not await self._persistence.wait_progress(_ARENA_POLL_SECONDS):
                    break
                wait_seconds -= _ARENA_POLL_SECONDS / 4
                slot = evictor.allocate(header.payload_bytes, tenant)
            if slot is None:
                if copies:
                    break
                over = evictor.over_quota(tenant, header.payload_bytes)
                return copies, COMMIT_OUTCOME_QUOTA_EXCEEDED if over else COMMIT_OUTCOME_ARENA_FULL, wait_seconds
            copies.append(_Copy(reservation, slot, checksum))
            size += header.payload_bytes
        return copies, None, wait_seconds

    async def _copy_and_verify(self, session: Session, copies: Sequence[_Copy]) -> list[bool]:
        """Copy from staging; return for each copy whether it has the promised checksum."""
        staging, arena = session.staging, self._tiers.arena
        assert staging is not None, "staging is kept while a commit runs"
        views = [staging.view(c.reservation.staged) for c in copies]

        def work() -> list[bool]:
            is_valid = []
            for view, copy in zip(views, copies, strict=True):
                arena.write(copy.slot, view)
                is_valid.append(keys.checksum(arena.read(copy.slot)) == copy.checksum)
            return is_valid

        try:
            return await self._threads.copy(work)
        except BaseException:
            for copy in copies:
                self._tiers.release_slot(copy.slot)
            raise
        finally:
            for view in views:
                with contextlib.suppress(BufferError):
                    view.release()

    def _insert(self, insertion: Insertion, copy: _Copy, is_valid: bool) -> CommitOutcome.ValueType:
        reservation = copy.reservation
        if not is_valid:
            self._tiers.release_slot(copy.slot)
            return COMMIT_OUTCOME_CHECKSUM_MISMATCH
        reservation.header.checksum = copy.checksum
        new_chunk = NewChunk(
            reservation.header,
            reservation.ids,
            reservation.tenant,
            copy.slot,
            reservation.hints,
            reservation.invalidated,
        )
        outcome = insertion.insert([new_chunk])[0]
        self._tiers.counters.commits += outcome is InsertOutcome.INSERTED
        return _OUTCOMES[outcome]

    def _touch(self, committed: Sequence[Reservation]) -> None:
        """Touch the ancestors of new chunks, unless a Match has just done so."""
        since = self._tiers.clock() - _RECENT_USE_SECONDS
        for reservation in committed:
            chunk = self._tiers.index.get(reservation.header.parent_prefix_hash)
            while chunk is not None and chunk.last_used_at < since:
                self._tiers.record_use([chunk], self._tiers.clock(), is_hit=False)
                self._tiers.touch(chunk)
                chunk = self._tiers.parent_of(chunk)

    # ---- abort and invalidation -----------------------------------------------------------------------------

    def abort(self, session: Session, reservation_ids: Iterable[bytes]) -> int:
        """End reservations; unknown ones are ignored. Returns the number of known ones."""
        aborted = 0
        for reservation_id in reservation_ids:
            reservation = session.reservations.pop(reservation_id, None)
            if reservation is not None:
                self._end_reservation(session, reservation)
                aborted += 1
        return aborted

    def invalidate(self, root: bytes, key: bytes, before: float = inf) -> None:
        """Invalidate reservations that a deletion concerns.

        A running commit does not insert their chunks either. These are the reservations of a tenant (with an empty
        root, of all) made by ``before`` (monotonic); with ``key``, only those of that chunk and its descendants. Their
        names can be reserved again at once.
        """
        leads: dict[bytes, bool] = {}
        concerned = {
            name: reservation
            for name, (_, reservation) in self._open_reservations.items()
            if root in (b"", reservation.header.root)
            and reservation.reserved_at <= before
            and (not key or self._is_descendant(name, key, leads))
        }
        for name, reservation in concerned.items():
            reservation.invalidated = True
            del self._open_reservations[name]

    def _is_descendant(self, name: bytes, key: bytes, known: dict[bytes, bool]) -> bool:
        """Return True if the path to a chunk contains ``key``; ``known`` caches answers."""
        path = []
        at: bytes | None = name
        while at is not None and at != key and at not in known:
            path.append(at)
            at = self._parent_of(at)
        found = at == key or (at is not None and known[at])
        known.update(dict.fromkeys(path, found))
        return found

    def _parent_of(self, key: bytes) -> bytes | None:
        """Return the parent's hash of a reserved or indexed chunk; None for others."""
        if key in self._open_reservations:
            return self._open_reservations[key][1].header.parent_prefix_hash
        chunk = self._tiers.index.get(key)
        return chunk.parent_key if chunk is not None else None

    def pending_tokens(self, parent_key: bytes, rest: bytes) -> int:
        """Return how many leading tokens of ``rest`` a chunk behind a parent has that is being written now."""
        newest = islice(reversed(self._open_reservations.values()), _MAX_COMPARED)
        shared = (common_bytes(r.ids, rest) for _, r in newest if r.header.parent_prefix_hash == parent_key)
        return max(shared, default=0) // keys.TOKEN_BYTES

    def _end_reservation(self, session: Session, reservation: Reservation) -> None:
        key = reservation.header.prefix_hash
        if self._open_reservations.get(key, (None, None))[1] is reservation:
            del self._open_reservations[key]
        if session.staging is not None:
            session.staging.free(reservation.staged)

    @contextlib.contextmanager
    def scoped_reservation(
        self, session: Session, tenant_salt: bytes, header: ChunkHeader, hints: PromptHints = NO_HINTS
    ) -> Iterator[ReserveResult]:
        """Reserve one chunk for the length of a block; aborted at its end unless committed."""
        reserved = self.reserve(session, tenant_salt, [header], hints)[0]
        try:
            yield reserved
        finally:
            self.abort(session, [reserved.reservation_id])
