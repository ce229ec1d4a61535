"""Write-behind to a remote tier, and deletions there: one task does both, in order, off everybody's path.

What waits is bounded: what comes while the queue is full is left out, and may come again with its next use. Payloads
are read from the arena when it is their turn; what has left the arena by then is not sent. Chunks go behind their
parents, so that what is found is found from the beginning.

A deletion stops what waits of its tenant at once, keeps everybody here from reading that tenant's chunks there, and is
tried until it is done, also after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import Literal

import structlog
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable import codec
from cache_daemon.memory.arena import Slot
from cache_daemon.remote import tombstones
from cache_daemon.remote.backend import RemoteBusy, RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.deletion_queue import DeletionQueue, PendingDeletion
from cache_daemon.remote.epoch_format import TenantEpochs, new_epoch
from cache_daemon.remote.remote_record import encode_payload
from cache_daemon.remote.remote_tier import EncodedChunk, RemoteTier
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.sessions import LeaseGuard
from cache_daemon.store.tier_manager import TierManager

RemoteWrite = Literal["second-use", "all", "never"]
NOTE_PREFIX = b"remote-forget:"
MAX_QUEUED_CHUNKS = 4096
_BATCH_CHUNKS, _BATCH_BYTES = 64, 16 << 20
_MAX_KNOWN_CHUNKS = 200_000
# How long to wait for a circuit that is open, before it is looked at again.
_RETRY_SECONDS = 0.25
_MAX_TRIES = 2
_LOOKUP_TIMEOUT_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


@dataclass
class WriteBehindCounters:
    """Since the start."""

    dropped: int = 0  # chunks that the queue had no room for, or that could not be sent in their turn
    withheld: int = 0  # times that a chunk was not offered since the engine had just lost its data
    deleted: int = 0  # deletions that were done there
    restored: int = 0  # times that a deletion was done again which the engine had lost


class WriteBehindQueue:
    """``note`` keeps a small value for the next start; None deletes it. ``in_thread`` runs what is heavy, ``told``
    hears what tenants' ``marks`` have to say."""

    def __init__(
        self,
        tiers: TierManager,
        tier: RemoteTier,
        policy: RemoteWrite,
        ttl_seconds: int | None,
        compress: bool,
        in_thread: Callable[[Callable[[], list[EncodedChunk]]], Awaitable[list[EncodedChunk]]],
        write_note: Callable[[bytes, bytes | None], None],
        epochs: DeletionEpochs,
        on_epoch_change: Callable[[bytes, EpochChange], None],
    ) -> None:
        self._tiers, self._tier, self._policy, self._ttl = tiers, tier, policy, ttl_seconds
        self._plane_compressor = codec.PlaneCompressor() if compress else None
        self._in_thread, self._write_note = in_thread, write_note
        self._queue: OrderedDict[bytes, tuple[Chunk, int]] = OrderedDict()  # by prefix hash; and how often it was tried
        self._stored_until: OrderedDict[bytes, float] = OrderedDict()  # what is there, and when it ends (monotonic)
        self._epochs, self._on_epoch_change = epochs, on_epoch_change
        self._deletions = DeletionQueue()
        self._backend_generation, self._num_in_flight = tier.backend_generation, 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self.write_lock = asyncio.Lock()  # for whoever writes there
        self._idle.set()
        self.counters = WriteBehindCounters()
        tiers.on_unindexed.append(self._on_unindexed)
        if policy == "all":
            tiers.on_committed.append(self._enqueue)

    @property
    def pending(self) -> int:
        return len(self._queue) + self._num_in_flight

    @property
    def deletions(self) -> int:
        return len(self._deletions)

    # ---- what is to be sent ---------------------------------------------------------------------------------

    def enqueue_used(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were found by a prompt, parents before children: their second use at least."""
        if self._policy != "never":
            for chunk in chunks:
                self._enqueue(chunk)

    def record_stored(self, chunk: Chunk, seconds: float) -> None:
        """The engine has the chunk for so many seconds still: it was just brought from there."""
        self._queue.pop(chunk.key, None)
        self._record_stored(chunk.key, seconds)

    def observe_epochs(self, root: bytes, epochs: TenantEpochs) -> EpochChange:
        """Hears a tenant's marks in the engine. Where somebody has deleted something there, or may have, what was
        listed here before that is not sent any more. Returns what the marks say."""
        change = self._epochs.observe(root, epochs)
        if change is not EpochChange.NONE:
            self._drop_queued_of(b"" if change is EpochChange.ALL_DELETED else root)
            if change is not EpochChange.CHUNKS_DELETED:
                self._stored_until.clear()
            self._on_epoch_change(root, change)
        if change is EpochChange.EPOCH_LOST and epochs.chunks_epoch:
            self.observe_epochs(root, epochs)  # chunks that were deleted meanwhile are news of their own
        return change

    def is_known_stored(self, key: bytes) -> bool:
        """Whether a chunk is known to be there, or was not long ago."""
        return key in self._stored_until

    def _enqueue(self, chunk: Chunk) -> None:
        if chunk.key in self._queue or self._is_stored(chunk):
            return
        if self._epochs.predates_deletion(chunk):
            return
        if self._epochs.is_withheld(chunk):
            self.counters.withheld += 1
            return
        if len(self._queue) >= MAX_QUEUED_CHUNKS or self.is_deleting(chunk.root):
            self.counters.dropped += 1
            return
        self._queue[chunk.key] = chunk, 0
        self._wake_up()

    def _is_stored(self, chunk: Chunk) -> bool:
        """Whether the engine is known to have a chunk. At half its time one that is still in use is written once more,
        and so is one that is to be kept for longer now than it was."""
        if self._backend_generation != self._tier.backend_generation:  # it may have lost all that it had
            self._backend_generation = self._tier.backend_generation
            self._stored_until.clear()
        ends = self._stored_until.get(chunk.key)
        if ends is None:
            return False
        ttl = self._ttl_of(chunk)
        return ends == inf or (ttl is not None and ends - time.monotonic() > ttl / 2)

    def _record_stored(self, key: bytes, seconds: float) -> None:
        self._stored_until[key] = time.monotonic() + seconds
        self._stored_until.move_to_end(key)
        if len(self._stored_until) > _MAX_KNOWN_CHUNKS:
            self._stored_until.popitem(last=False)

    def _ttl_of(self, chunk: Chunk) -> int | None:
        """The least of the tier's own, the tenant's, and what is left of the time that requests asked for."""
        limits = [n for n in (self._ttl, chunk.tenant.limits.ttl_seconds) if n is not None]
        if chunk.expires_at < inf:
            limits.append(chunk.expires_at - self._tiers.clock())
        return max(1, ceil(min(limits))) if limits else None

    def _on_unindexed(self, chunk: Chunk) -> None:
        self._queue.pop(chunk.key, None)

    def _drop_queued_of(self, root: bytes) -> None:
        for key in [key for key, (chunk, _) in self._queue.items() if root in (b"", chunk.root)]:
            del self._queue[key]

    # ---- what is to be deleted ------------------------------------------------------------------------------

    def is_deleting(self, root: bytes) -> bool:
        """Whether a tenant's chunks are being deleted there: until that is done they are not to be read."""
        return self._deletions.concerns(root)

    def delete(self, root: bytes, key: bytes, known: bool) -> asyncio.Future[int]:
        """Deletes a chunk with what continues it, without ``key`` a tenant, without ``root`` everything. The future is
        done when it is; its result is how many chunks there were, as far as that is known. A chunk that is not
        ``known`` here is looked up first. Raises LimitExceeded, with nothing done."""
        self._deletions.check(root, key)
        return self._enqueue_deletion(root, key, known)

    def _enqueue_deletion(self, root: bytes, key: bytes, known: bool) -> asyncio.Future[int]:
        deletion = self._deletions.add(root, key, known)
        if not key:
            self._drop_queued_of(root)
        self._write_note(NOTE_PREFIX + root + key, b"\1")
        self._wake_up()
        return deletion.repeat or deletion.done

    def restore(self, name: bytes) -> None:
        """Takes up a deletion of an earlier start."""
        rest = name[len(NOTE_PREFIX) :]
        if len(rest) in (0, keys.HASH_BYTES, 2 * keys.HASH_BYTES):
            self._enqueue_deletion(rest[: keys.HASH_BYTES], rest[keys.HASH_BYTES :], True)
        else:
            self._write_note(name, None)

    # ---- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends and deletes until it is cancelled."""
        while True:
            await self._wake.wait()
            if not (self._queue or self._deletions or self._tier.corrupt_records):
                self._wake.clear()
                self._idle.set()
                continue
            if not (self._tier.writes.allows_calls and self._tier.reads.allows_calls):
                self._idle.set()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._idle.clear()
            try:
                async with self.write_lock:
                    await self._run_step()
            except RemoteFailed:
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                log.exception("writing to the remote tier failed, going on")
                await asyncio.sleep(_RETRY_SECONDS)

    async def settle(self) -> None:
        """Waits until nothing is to be done, or can be done."""
        await self._idle.wait()

    def wake_for_corrupt(self) -> None:
        """There may be something to do."""
        if self._tier.corrupt_records:
            self._wake_up()

    def _wake_up(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _run_step(self) -> None:
        if self._deletions:
            await self._run_deletion(self._deletions.first())
        elif self._tier.corrupt_records:
            await self._tier.remove_corrupt()
            self._stored_until.clear()
        else:
            await self._send(self._batch())

    async def _run_deletion(self, deletion: PendingDeletion) -> None:
        root, key, gone = deletion.root, deletion.key, 0
        if key:
            # Walking over all that the engine has of a tenant takes long: not for a hash that nobody knows.
            if deletion.is_known or await self._tier.contains(root, key):
                gone, left = await tombstones.delete_subtree(self._tier, root, key)
                self._epochs.record_own_tombstones(root, left)
        else:
            # Once: what others write from then on is theirs, however often removing the rest is tried.
            if deletion.bumped_generation != self._tier.backend_generation:
                await self._bump_epoch(deletion)
                deletion.bumped_generation = self._tier.backend_generation
            await tombstones.purge(self._tier, root)
        if gone or not key:
            self._stored_until.clear()
        self.counters.deleted += 1
        if self._deletions.finish(deletion, gone):
            self._write_note(NOTE_PREFIX + root + key, None)

    async def _bump_epoch(self, deletion: PendingDeletion) -> None:
        """Makes a tenant, without ``root`` everything, worthless there. The mark replaces those of other nodes'
        deletions, so they are heard first; it stays the same while it is tried, or it were another node's."""
        root, crossed = deletion.root, False
        deletion.epoch = deletion.epoch or new_epoch(deletion=True)
        if root:
            marks = (await self._tier.read_epochs([root]))[0]
            before = marks.tenant_epoch
            if before != deletion.epoch:
                crossed = self.observe_epochs(root, marks) is EpochChange.TENANT_DELETED
            if marks.chunks_epoch is not None and not crossed:  # the names of deleted chunks go, too
                crossed = bool(
                    self._epochs.unapplied_tombstones(root, await tombstones.read_tombstones(self._tier, root))
                )
        else:
            before = await self._tier.read_global_epoch()
        await tombstones.bump_epoch(self._tier, root, deletion.epoch)
        # An engine that shows the mark of before has lost the deletion.
        self._epochs.record_own_deletion(root, deletion.epoch, before, crossed=crossed)
        deletion.epoch = b""
        if crossed:
            self._on_epoch_change(root, EpochChange.TENANT_DELETED)

    def _batch(self) -> list[Chunk]:
        """The next chunks of one tenant, taken from the queue."""
        out: list[Chunk] = []
        size = 0
        for chunk, _ in islice(self._queue.values(), _BATCH_CHUNKS):
            if out and (chunk.root != out[0].root or size + chunk.size_bytes > _BATCH_BYTES):
                break
            out.append(chunk)
            size += chunk.size_bytes
        return out

    async def _send(self, batch: Sequence[Chunk]) -> None:
        tries = {chunk.key: self._queue.pop(chunk.key)[1] for chunk in batch}
        self._num_in_flight = len(batch)
        try:
            await self._write(batch)
        except BaseException as error:
            # Before what came later, and once more only where it was tried.
            more = 0 if isinstance(error, RemoteBusy) else 1
            for chunk in reversed(batch):
                if tries[chunk.key] + more < _MAX_TRIES and chunk.indexed and not self.is_deleting(chunk.root):
                    self._queue[chunk.key] = chunk, tries[chunk.key] + more
                    self._queue.move_to_end(chunk.key, last=False)
                else:
                    self.counters.dropped += 1
            raise
        finally:
            self._num_in_flight = 0

    async def push(self, batch: Sequence[Chunk]) -> tuple[list[Chunk], int]:
        """Writes chunks of one tenant now, whatever the policy; they are held. Returns those that were written, and how
        many were there. Raises RemoteFailed."""
        async with self.write_lock:
            if self.is_deleting(batch[0].root):
                raise RemoteFailed("a deletion of this tenant is not done there yet")
            for chunk in batch:
                self._queue.pop(chunk.key, None)
            return await self._write(batch, by_command=True)

    async def _write(self, batch: Sequence[Chunk], by_command: bool = False) -> tuple[list[Chunk], int]:
        """Returns those that were written, and how many were there. What goes ``by_command`` is not withheld
        after a loss of the engine's data."""
        root = batch[0].root
        parents = [c.parent_key for c in batch if not c.is_first]
        asked = list(dict.fromkeys([*(c.key for c in batch), *parents]))
        found = await self._tier.find(root, asked, _LOOKUP_TIMEOUT_SECONDS)
        if found.record_epoch is None:
            await self._tier.create_tenant_epoch(root)
            found = await self._tier.find(root, asked, _LOOKUP_TIMEOUT_SECONDS)
        if found.record_epoch is None:
            raise RemoteFailed("it does not keep what it is given")
        news = self.observe_epochs(root, found.epochs)
        if news is not EpochChange.NONE and not (by_command and news is EpochChange.EPOCH_LOST):
            self.counters.dropped += len(batch)
            return [], 0
        entries = {key: entry for key, entry in zip(asked, found.records, strict=True) if entry is not None}
        there = set(entries)
        fresh, known = list[Chunk](), 0
        for chunk in batch:
            entry = entries.get(chunk.key)
            if entry is not None and self._tier.outlives_half_ttl(entry, self._ttl_of(chunk)):
                self._record_stored(chunk.key, self._tier.seconds_left(entry))
                known += 1
            elif self._is_sendable(chunk, by_command) and (chunk.is_first or chunk.parent_key in there):
                fresh.append(chunk)
                there.add(chunk.key)
            else:
                self.counters.dropped += 1
        if not fresh:
            return [], known
        hold = LeaseGuard(fresh, self._tiers.on_released)
        try:
            outgoing = await self._in_thread(self._encode_work(fresh, found.record_epoch))
        finally:
            hold.release()
        await self._tier.store(outgoing)
        for out in outgoing:
            self._record_stored(out.header.prefix_hash, inf if out.ttl_seconds is None else out.ttl_seconds)
        return fresh, known

    def _is_sendable(self, chunk: Chunk, by_command: bool) -> bool:
        is_from_before = self._epochs.predates_deletion(chunk) or (not by_command and self._epochs.is_withheld(chunk))
        return chunk.indexed and chunk.arena_state is Residency.PRESENT and not is_from_before

    def _encode_work(self, chunks: Sequence[Chunk], mark: bytes) -> Callable[[], list[EncodedChunk]]:
        """Work for a thread; all that changes meanwhile is read before."""
        jobs: list[tuple[ChunkHeader, Slot, int | None]] = []
        for chunk in chunks:
            assert chunk.slot is not None, "a resident has a slot"
            jobs.append((chunk.full_header(), chunk.slot, self._ttl_of(chunk)))
        arena, seal, plane_compressor = self._tiers.arena, self._tier.cipher, self._plane_compressor

        def work() -> list[EncodedChunk]:
            out = []
            for header, slot, ttl in jobs:
                kind, stored = encode_payload(seal, header, arena.read(slot), plane_compressor)
                out.append(EncodedChunk(header, kind, stored, keys.checksum(stored), ttl, mark))
            return out

        return work
