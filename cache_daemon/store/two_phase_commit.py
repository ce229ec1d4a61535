"""Two-phase commit: makes reserved chunks visible.

A worker writes into its session's staging memory. Commit copies the chunk from staging into the arena, verifies the
copy and inserts it. So no write of a worker, before or after Commit, changes a byte that a reader sees.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import (
    COMMIT_OUTCOME_ARENA_FULL,
    COMMIT_OUTCOME_CHECKSUM_MISMATCH,
    COMMIT_OUTCOME_COMMITTED,
    COMMIT_OUTCOME_PARENT_MISSING,
    COMMIT_OUTCOME_QUOTA_EXCEEDED,
    CommitOutcome,
)
from kvsidecar.errors import InvalidRequest, StaleEpoch, UnknownLease

from cache_daemon.memory.arena import Slot
from cache_daemon.store.insertion import ChunkInserter, Insertion, InsertOutcome, NewChunk
from cache_daemon.store.loss_cause import LossCause, LostChunk
from cache_daemon.store.prefill_time_bounds import PrefillTimeBounds
from cache_daemon.store.reservations import Reservations
from cache_daemon.store.sessions import Reservation, Session
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# Maximal bytes and chunks of one piece of work on the copy threads.
_COPY_BYTES, _COPY_CHUNKS = 16 << 20, 32
# Longest time that a commit waits while the arena is full, possibly of chunks that are being written to disk.
_ARENA_WAIT_SECONDS, _ARENA_POLL_SECONDS = 2.0, 0.25
# Within this time, uses of a chunk by Match and Commit count as one use for the eviction policies.
_SAME_USE_SECONDS = 30.0

_OUTCOMES = {
    InsertOutcome.INSERTED: COMMIT_OUTCOME_COMMITTED,
    InsertOutcome.PRESENT: COMMIT_OUTCOME_COMMITTED,  # another writer was faster
    InsertOutcome.PARENT_MISSING: COMMIT_OUTCOME_PARENT_MISSING,
    InsertOutcome.DELETED: COMMIT_OUTCOME_PARENT_MISSING,
    InsertOutcome.ENTRIES_EXCEEDED: COMMIT_OUTCOME_QUOTA_EXCEEDED,
    InsertOutcome.INDEX_FULL: COMMIT_OUTCOME_ARENA_FULL,
}


@dataclass(frozen=True)
class _Copy:
    reservation: Reservation
    slot: Slot
    checksum: int


class TwoPhaseCommit:
    """Running commits of all sessions. Runs on the event loop."""

    def __init__(
        self,
        tiers: TierManager,
        inserter: ChunkInserter,
        reservations: Reservations,
        epoch: int,
        threads: StoreThreads,
    ) -> None:
        self._tiers, self._inserter, self._reservations = tiers, inserter, reservations
        self._persistence, self._epoch, self._threads = inserter.persistence, epoch, threads
        self._prefill_time_bounds = PrefillTimeBounds()
        self._running: set[asyncio.Future[list[CommitOutcome.ValueType]]] = set()

    async def commit(
        self, session: Session, epoch: int, items: Sequence[tuple[bytes, int]]
    ) -> list[CommitOutcome.ValueType]:
        """Make reserved chunks visible.

        ``items`` are ``(reservation id, checksum)``, parents before children. Raises StaleEpoch, UnknownLease or
        InvalidRequest and then changes nothing. Otherwise it ends all named reservations, and returns one outcome per
        item. Cancelling the caller does not stop the commit.
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
        """Wait for running commits, including commits whose caller was cancelled."""
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
                    outcomes += [
                        self._insert(session, insertion, c, ok) for c, ok in zip(copies, is_valid, strict=True)
                    ]
                    await yield_timer.maybe_yield()
                    if refusal is not None and len(outcomes) < len(items_taken):
                        self._record_refusal(items_taken[len(outcomes)][0], refusal)
                        outcomes.append(refusal)
        finally:
            for reservation, _ in items_taken:
                self._reservations.end(session, reservation)
            session.committing -= 1
            session.close_staging()
        await self._touch([r for (r, _), o in zip(items_taken, outcomes, strict=True) if o == COMMIT_OUTCOME_COMMITTED])
        return outcomes

    def _record_refusal(self, refused: Reservation, refusal: CommitOutcome.ValueType) -> None:
        over = refusal == COMMIT_OUTCOME_QUOTA_EXCEEDED
        cause, header = LossCause.ARENA_QUOTA if over else LossCause.ARENA_FULL, refused.header
        lost = LostChunk(refused.tenant, header.parent_prefix_hash, header.start_position, refused.ids, cause)
        self._tiers.record_loss(lost)

    async def _allocate_slots(
        self, items_taken: Sequence[tuple[Reservation, int]], wait_seconds: float
    ) -> tuple[list[_Copy], CommitOutcome.ValueType | None, float]:
        """Allocate slots for the next piece of work on the copy threads.

        Also returns the outcome of the next chunk if it is refused, and the remaining waiting time in seconds.
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

    def _insert(self, session: Session, insertion: Insertion, copy: _Copy, is_valid: bool) -> CommitOutcome.ValueType:
        reservation = copy.reservation
        if not is_valid:
            self._tiers.release_slot(copy.slot)
            return COMMIT_OUTCOME_CHECKSUM_MISMATCH
        reservation.header.checksum = copy.checksum
        reservation.header.prefill_seconds = self._prefill_time_bounds.clamp(session, reservation.header)
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

    async def _touch(self, committed: Sequence[Reservation]) -> None:
        """Record a use of the ancestors of new chunks, each once.

        A Match has not always done so: a worker's pool serves short turns of a conversation without one.
        """
        now, yield_timer = self._tiers.clock(), YieldTimer()
        for reservation in committed:
            chunk = self._tiers.index.get(reservation.header.parent_prefix_hash)
            while chunk is not None and chunk.last_used_at < now:
                self._tiers.record_use([chunk], now, is_hit=False)
                if chunk.touched_at < now - _SAME_USE_SECONDS:
                    self._tiers.touch(chunk)
                else:
                    self._tiers.save_recency(chunk)
                await yield_timer.maybe_yield()
                chunk = self._tiers.parent_of(chunk)
