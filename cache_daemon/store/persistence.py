"""Writes chunks to the durable tier: supersession, retries, recency.

The durable tier is always closed under parents: a chunk is queued only after its parent, and a superseded chunk is
removed in the transaction that stores the longer chunk. So after any crash the stored chunks are complete, and no
durable token is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import islice

import structlog
from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_PERSISTED, StatsResponse

from cache_daemon.durable.durable_tier import PutOutcome, PutResult, whole_pages
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.disk_evictor import DiskEvictor
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tier_manager import TierManager

_FULL, _FULL_SECONDS = "the disk is full", 5.0
_SAME_GROUP_SECONDS = 0.5  # failures of one group of writes are closer together; retries are a second apart
_MAX_RETRIES_IN_FLIGHT = 256
# Delay of ``persist_delayed``, in which the fetching request can use the cores.
_DELAY_SECONDS = 1.0
# Size of a stored header and its index entries, without the token ids (up to five bytes per token).
_HEADER_BYTES = 1024

log = structlog.get_logger("cache_daemon")


class Persistence:
    """Writes of one store to its durable tier. Runs on the event loop."""

    def __init__(self, tiers: TierManager, evictor: DiskEvictor, writer: GroupCommitWriter) -> None:
        self._tiers, self.evictor, self._writer = tiers, evictor, writer
        self._in_flight = 0
        # Chunks that are only in the arena, oldest first: in ``_failed`` because a write failed, in ``_not_admitted``
        # because the budget does not admit them.
        self._failed: dict[Chunk, None] = {}
        self._not_admitted: dict[Chunk, None] = {}
        self._delayed: dict[Chunk, None] = {}  # see persist_delayed
        self._timer: asyncio.TimerHandle | None = None
        self._progress_event = asyncio.Event()
        self._full_since, self._full_at = 0.0, float("-inf")  # when the disk became full, and when it was last full
        tiers.on_unindexed.append(self._on_unindexed)

    def discard(self, key: bytes) -> None:
        """Remove a chunk that cannot be indexed from the tier."""
        self._writer.remove([key])

    def persist(self, chunk: Chunk) -> None:
        """Queue a chunk in the arena if it may be durable now; otherwise retry later.

        A child of a delayed chunk waits with its parent.
        """
        if not chunk.indexed or chunk.disk_state is not Residency.ABSENT or chunk.arena_state is not Residency.PRESENT:
            return
        self._failed.pop(chunk, None)
        self._not_admitted.pop(chunk, None)
        parent = self._tiers.parent_of(chunk)
        if parent in self._delayed:
            self._delayed[chunk] = None
            return
        if self._writer.hung:
            self._failed[chunk] = None
            return
        if parent is not None and parent.disk_state is Residency.ABSENT:
            (self._failed if parent in self._failed else self._not_admitted)[chunk] = None
            return
        if not self.evictor.make_space(chunk, parent, _max_stored_bytes(chunk)):
            self._not_admitted[chunk] = None
            return
        slot = chunk.slot
        assert slot is not None
        self._tiers.begin_write(chunk, _max_stored_bytes(chunk))
        self._in_flight += 1
        replaced = [
            old
            for old in chunk.write_state.supersedes
            if old.indexed and old.disk_state is not Residency.ABSENT and not self._tiers.index.has_children(old)
        ]
        self._writer.put(
            chunk.full_header(),
            lambda: self._tiers.arena.read(slot),
            tuple(old.key for old in replaced),
            lambda: _milliseconds(chunk.last_used_at),
            lambda result: self._on_written(chunk, replaced, result),
        )

    def persist_delayed(self, chunk: Chunk) -> None:
        """Queue a chunk like ``persist``, but 1 s later.

        Chunks from the remote tier use it, so that compressing them does not compete with the request that still
        fetches.
        """
        self._delayed[chunk] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_SECONDS, self.flush_delayed)

    def flush_delayed(self) -> None:
        """Queue the delayed chunks now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delayed, self._delayed = self._delayed, {}
        for chunk in delayed:
            self.persist(chunk)

    def supersede(self, chunk: Chunk, old: Chunk) -> None:
        """Let ``chunk`` replace a childless sibling that is a prefix of it.

        The sibling is removed at once if it is not durable; otherwise when ``chunk`` is durable.
        """
        if old.disk_state is Residency.ABSENT:
            self._tiers.remove_subtree(old, LossCause.SUPERSEDED)
        else:
            old.write_state.superseder_count += 1
            chunk.write_state.supersedes.append(old)

    def retry_used(self, chunks: Iterable[Chunk]) -> None:
        """Retry used chunks that are not on disk, because the tier may admit them after a use.

        During an outage, failed writes are left to ``retry``.
        """
        left = self._failed if self.failing else {}
        for chunk in chunks:
            if chunk.disk_state is Residency.ABSENT and chunk not in self._delayed and chunk not in left:
                self.persist(chunk)

    def retry(self) -> None:
        """Retry failed writes, and chunks that the budget may now admit. Call it once a second.

        Parents come before children. While the disk hangs, this fails all queued writes except the running one, so that
        their memory in the arena can be freed.
        """
        if self._writer.hung and (given_up := self._writer.fail_queued()):
            log.error("the disk hangs; queued chunks stay in memory only", chunks=given_up)
        if not self._is_full:  # the outage may have ended without a retry
            self.evictor.reset_limit()
        # During an outage, one retry at a time shows whether writes succeed again.
        most = (1 if self.failing else _MAX_RETRIES_IN_FLIGHT) - self._in_flight
        if most > 0 and self._failed:
            self._retry_failed(most)
        elif most > 0 and self.failing and self._not_admitted:
            # No failed chunk is left to retry. Allow the whole budget, so that the next new chunk shows whether the
            # disk has space again.
            self.evictor.reset_limit()
            self.persist(next(iter(self._not_admitted)))
        elif most > 0:
            for chunk in list(islice(self._not_admitted, most)):
                del self._not_admitted[chunk]
                if self._fits(chunk):
                    self.persist(chunk)
                else:
                    self._not_admitted[chunk] = None

    async def settle(self) -> None:
        """Wait until no write is in flight or delayed."""
        while not self.is_settled:
            await self.wait_progress(0.1)

    async def finish(self) -> None:
        """Wait until all writes have ended, and retry failed writes once. Call it before the daemon ends.

        Without the retry, chunks whose write fails during the shutdown would be lost, and their children with them.
        """
        await self.settle()
        self._retry_failed(len(self._failed))
        await self.settle()

    def _retry_failed(self, most: int) -> None:
        if self._is_full:
            self.evictor.reset_limit()
        for chunk in list(self._failed):
            if most > 0 and self._tiers.parent_of(chunk) not in self._failed:
                self.persist(chunk)
                most -= 1

    def _fits(self, chunk: Chunk) -> bool:
        """Return True if a chunk fits into the tier without an eviction."""
        parent = self._tiers.parent_of(chunk)
        has_parent = parent is None or parent.disk_state is not Residency.ABSENT
        return has_parent and self.evictor.has_space(chunk, _max_stored_bytes(chunk))

    @property
    def failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic seconds) of an outage; None while writes succeed."""
        return self._writer.failing or ((_FULL, self._full_since) if self._is_full else None)

    @property
    def _is_full(self) -> bool:
        return time.monotonic() - self._full_at < _FULL_SECONDS

    def write_recency(self) -> None:
        """Persist recent uses of durable chunks, for eviction after a restart."""
        used, self._tiers.unsaved_recency = self._tiers.unsaved_recency, {}
        if used:
            self._writer.used({key: _milliseconds(at) for key, at in used.items()})

    @property
    def is_settled(self) -> bool:
        """True when no write is in flight or delayed."""
        return not self._in_flight and not self._delayed

    @property
    def num_postponed(self) -> int:
        """Number of chunks that will be queued later or again.

        Chunks that a full disk cannot take stay in the arena and do not count.
        """
        return len(self._delayed) + (0 if self._is_full else len(self._failed))

    def write_to(self, out: StatsResponse) -> None:
        """Set the statistics of the durable tier."""
        quotas = self.evictor.quotas
        out.durable_budget_bytes, out.durable_bytes = self.evictor.budget_bytes, quotas.used_bytes
        out.durable_chunks, out.pending_writes = len(quotas), self._writer.pending + self.num_postponed
        out.durable_failing = (self.failing or ("",))[0]  # read once: the outage may end before a second read

    async def wait_progress(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until a write ends. Returns False when none did."""
        self.flush_delayed()
        if not self._in_flight:
            return False
        event = self._progress_event
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    def _on_written(self, chunk: Chunk, replaced: list[Chunk], result: PutResult) -> None:
        self._in_flight -= 1
        stored = result.outcome is PutOutcome.STORED
        if not chunk.indexed:
            self._tiers.discard_write(chunk)
            for old in replaced if stored else []:
                self._requeue(old, LossCause.ARENA_FULL)
        elif stored:
            self._tiers.finish_write(chunk, result.stored_bytes)
            for old in replaced:
                if old.indexed:  # the transaction removed ``old``, but another write of ``old`` may be in flight
                    self._tiers.remove_subtree(
                        old, LossCause.SUPERSEDED, on_disk_too=old.disk_state is not Residency.PRESENT
                    )
            for old in chunk.write_state.supersedes:
                old.write_state.superseder_count -= 1
            chunk.write_state.supersedes.clear()
            self._tiers.emit(EVENT_TYPE_PERSISTED, chunk)
        else:
            self._tiers.abort_write(chunk)
            if result.outcome is PutOutcome.CORRUPT:
                self._drop_corrupt(chunk)
            elif result.outcome is PutOutcome.REPLACED:
                self._failed[chunk] = None  # its successor's result removes it, unless the successor has been deleted
            elif result.outcome is not PutOutcome.CANCELLED:
                if result.outcome is PutOutcome.PARENT_MISSING:
                    self._requeue_lost(self._tiers.parent_of(chunk))
                if chunk.indexed:
                    self._record_failure(chunk, result.outcome)
        self._tiers.on_released(chunk)
        self._progress_event.set()
        self._progress_event = asyncio.Event()

    def _drop_corrupt(self, chunk: Chunk) -> None:
        """Remove a chunk whose bytes in the arena differ from the committed bytes."""
        self._tiers.counters.corrupt_chunks += 1
        dropped = self._tiers.remove_subtree(chunk, LossCause.CORRUPT)
        log.error("a chunk in memory is corrupt: removed with its descendants", chunk=chunk.key.hex(), dropped=dropped)

    def _record_failure(self, chunk: Chunk, outcome: PutOutcome) -> None:
        self._tiers.counters.failed_writes += 1
        chunk.write_state.maybe_on_disk = chunk.write_state.maybe_on_disk or outcome is PutOutcome.FAILED
        if outcome is PutOutcome.OUT_OF_SPACE:
            now = time.monotonic()
            if not self._is_full:
                self._full_since = now
                self.evictor.begin_shrinking()
            elif now - self._full_at > _SAME_GROUP_SECONDS:  # one eviction for all chunks of a failed group
                self._writer.flush(self._shrink_further)
            self._full_at = now
            self.evictor.lower_limit()
        self._failed[chunk] = None

    def _shrink_further(self, flushed: PutResult) -> None:
        """Evict again once the removals of the last eviction are on disk, unless the disk refuses removals, too."""
        if flushed.outcome is PutOutcome.STORED:
            self.evictor.shrink_further()

    def _on_unindexed(self, chunk: Chunk) -> None:
        self._failed.pop(chunk, None)
        self._not_admitted.pop(chunk, None)
        self._delayed.pop(chunk, None)
        for old in chunk.write_state.supersedes:  # ``chunk`` never became durable: ``old`` stays
            old.write_state.superseder_count -= 1
        chunk.write_state.supersedes.clear()

    def _requeue_lost(self, chunk: Chunk | None) -> None:
        """Queue a durable chunk again that the tier has lost, with its descendants.

        A repair of the data file may lose chunks while the daemon serves. The tier has no chunk without its ancestors.
        """
        if chunk is not None and chunk.disk_state is Residency.PRESENT:
            for member in self._tiers.index.subtree(chunk):
                self._requeue(member, LossCause.CORRUPT)

    def _requeue(self, chunk: Chunk, cause: LossCause) -> None:
        """Queue a chunk again that the tier had and has no more, such as a superseded chunk whose successor was lost.

        If the arena has not got it either, remove it with its descendants, for ``cause``.
        """
        if not chunk.indexed or chunk.disk_state is not Residency.PRESENT:
            return
        self._tiers.abort_write(chunk)
        if chunk.arena_state is Residency.PRESENT:
            self._failed[chunk] = None
        else:
            self._tiers.remove_subtree(chunk, cause)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts match the chunks' states."""
        everything = [*self._tiers.index, *self._tiers.zombies]
        arriving = sum(c.disk_state is Residency.IN_FLIGHT for c in everything)
        assert arriving == self._in_flight, "chunks being written do not add up"
        assert all(c.indexed for c in [*self._failed, *self._not_admitted, *self._delayed]), (
            "an unlisted chunk waits to be written"
        )


def _max_stored_bytes(chunk: Chunk) -> int:
    """Return the maximal size of a chunk in the tier; the write determines the exact size."""
    return whole_pages(chunk.size_bytes) + whole_pages(_HEADER_BYTES + len(chunk.ids) * 5 // 4)


def _milliseconds(used_at: float) -> int:
    """Convert a time of last use to the durable tier's milliseconds."""
    return int(used_at * 1000)
