"""Write-behind to the remote tier: a bounded queue and one task that writes it.

The task also runs this node's deletions, in order with the writes. While the queue is full, new chunks are dropped;
their next use may enqueue them again. The task reads payloads from the arena when it writes them, and skips a chunk
that has left the arena. It writes parents before their children, because a match finds a chunk only if its whole prefix
is stored.
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

from cache_daemon.durable import payload_codec
from cache_daemon.memory.arena import Slot
from cache_daemon.remote.backend import RemoteBusy, RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.remote_record import encode_payload
from cache_daemon.remote.remote_tier import EncodedChunk, RemoteTier
from cache_daemon.remote.tombstones import DeletionWriter
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.tier_manager import TierManager

RemoteWrite = Literal["second-use", "all", "never"]
MAX_QUEUED_CHUNKS = 4096
_BATCH_CHUNKS, _BATCH_BYTES = 64, 16 << 20
_MAX_KNOWN_CHUNKS = 200_000
# Interval at which an open circuit is checked.
_RETRY_SECONDS = 0.25
_MAX_TRIES = 2
_LOOKUP_TIMEOUT_SECONDS = 2.0
# A chunk that is used this long after the backend was known to have it is looked up again: the backend may have
# evicted it, most likely a chunk that all nodes hold and none reads.
_CHECK_SECONDS = 300.0

log = structlog.get_logger("cache_daemon")


@dataclass(frozen=True)
class WritePolicy:
    """Write mode, TTL and compression of the remote tier; ``ttl_seconds`` None means no expiry."""

    write: RemoteWrite
    ttl_seconds: int | None
    compress: bool


@dataclass
class WriteBehindCounters:
    """Totals since the start."""

    dropped: int = 0  # chunks dropped because the queue was full or the write failed
    withheld: int = 0  # chunks not enqueued or written because the backend had just lost its data


class WriteBehindQueue:
    """Bounded queue of chunks to write, and the task that writes them.

    The task also runs deletions, in order with the writes. ``run_in_thread`` runs the encoding of payloads. The task
    holds ``write_lock`` while it writes to the backend. Runs on the event loop.
    """

    def __init__(
        self,
        tiers: TierManager,
        tier: RemoteTier,
        policy: WritePolicy,
        epochs: DeletionEpochs,
        deletions: DeletionWriter,
        run_in_thread: Callable[[Callable[[], list[EncodedChunk]]], Awaitable[list[EncodedChunk]]],
    ) -> None:
        self._tiers, self._tier, self._policy = tiers, tier, policy
        self._epochs, self._deletions, self._run_in_thread = epochs, deletions, run_in_thread
        self._plane_compressor = payload_codec.PlaneCompressor() if policy.compress else None
        self._queue: OrderedDict[bytes, tuple[Chunk, int]] = OrderedDict()  # prefix hash -> chunk, number of tries
        # key -> expiry in the backend, and when to look it up again (monotonic)
        self._stored: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._backend_generation, self._num_in_flight = tier.backend_generation, 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self.write_lock = asyncio.Lock()
        self._idle.set()
        self.counters = WriteBehindCounters()
        tiers.on_unindexed.append(self._on_unindexed)
        if policy.write == "all":
            tiers.on_committed.append(self._enqueue)
        epochs.on_change.append(self._on_epoch_change)

    @property
    def is_writing(self) -> bool:
        """Return True if this node writes chunks without a command."""
        return self._policy.write != "never"

    @property
    def has_to_write(self) -> bool:
        """Return True if this node writes chunks without a command, or has deletions to write."""
        return self.is_writing or len(self._deletions) > 0

    @property
    def pending(self) -> int:
        """Number of chunks queued or being written."""
        return len(self._queue) + self._num_in_flight

    # ---- the queue ------------------------------------------------------------------------------------------

    def enqueue_used(self, chunks: Iterable[Chunk]) -> None:
        """Enqueue chunks that a prompt matched, parents before children.

        A match is at least the second use of a chunk, so the mode "second-use" writes it.
        """
        if self.is_writing:
            for chunk in chunks:
                self._enqueue(chunk)

    def enqueue_again(self, chunk: Chunk) -> bool:
        """Enqueue a chunk again if the write mode selects it. Returns whether it is queued."""
        if not self.is_writing or (self._policy.write == "second-use" and not chunk.hits):
            return False
        self._enqueue(chunk)
        return chunk.key in self._queue

    def record_stored(self, chunk: Chunk, seconds: float) -> None:
        """Record that a chunk was just fetched, and expires in the backend after ``seconds``."""
        self._queue.pop(chunk.key, None)
        self._record_stored(chunk.key, seconds)

    def on_deletion(self, root: bytes, key: bytes) -> None:
        """Drop queued chunks of a deleted tenant, and wake the task."""
        if not key:
            self._drop_queued_of(root)
        self.wake()

    def _on_epoch_change(self, root: bytes, change: EpochChange) -> None:
        """Drop queued chunks that may be deleted, or that predate a loss of data."""
        self._drop_queued_of(b"" if change is EpochChange.ALL_DELETED else root)
        if change is not EpochChange.CHUNKS_DELETED:
            self._stored.clear()

    def forget_stored(self, key: bytes) -> bool:
        """Forget that the backend has the chunk, or had it recently. Returns False if that was not known."""
        return self._stored.pop(key, None) is not None

    def _enqueue(self, chunk: Chunk) -> None:
        if chunk.key in self._queue or self._is_stored(chunk):
            return
        if self._epochs.predates_deletion(chunk):
            return
        if self._epochs.is_withheld(chunk):
            self.counters.withheld += 1
            return
        if len(self._queue) >= MAX_QUEUED_CHUNKS or self._deletions.is_deleting(chunk.root):
            self.counters.dropped += 1
            return
        self._queue[chunk.key] = chunk, 0
        self.wake()

    def _is_stored(self, chunk: Chunk) -> bool:
        """Return True if the backend is known to have a chunk.

        A chunk that is used after half of its TTL is written again, and so is one whose TTL was extended. A chunk that
        was not looked up for ``_CHECK_SECONDS`` is not known; the task looks it up, and writes it if it is missing.
        """
        if self._backend_generation != self._tier.backend_generation:  # the backend may have lost all data
            self._backend_generation = self._tier.backend_generation
            self._stored.clear()
        ends, check_at = self._stored.get(chunk.key, (0.0, 0.0))
        now = time.monotonic()
        if now >= check_at:
            return False
        ttl = self._ttl_of(chunk)
        return ends == inf or (ttl is not None and ends - now > ttl / 2)

    def _record_stored(self, key: bytes, seconds: float) -> None:
        now = time.monotonic()
        self._stored[key] = now + seconds, now + _CHECK_SECONDS
        self._stored.move_to_end(key)
        if len(self._stored) > _MAX_KNOWN_CHUNKS:
            self._stored.popitem(last=False)

    def _ttl_of(self, chunk: Chunk) -> int | None:
        """Return the shortest of the tier's TTL, the tenant's TTL, and the remaining TTL that requests set."""
        limits = [n for n in (self._policy.ttl_seconds, chunk.tenant.limits.ttl_seconds) if n is not None]
        if chunk.expires_at < inf:
            limits.append(chunk.expires_at - self._tiers.clock())
        return max(1, ceil(min(limits))) if limits else None

    def _on_unindexed(self, chunk: Chunk) -> None:
        self._queue.pop(chunk.key, None)

    def _drop_queued_of(self, root: bytes) -> None:
        for key in [key for key, (chunk, _) in self._queue.items() if root in (b"", chunk.root)]:
            del self._queue[key]

    # ---- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write and delete until cancelled."""
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
        """Wait until nothing is pending, or until nothing can be written."""
        await self._idle.wait()

    def wake_for_corrupt(self) -> None:
        """Wake the task if corrupt records are queued for removal."""
        if self._tier.corrupt_records:
            self.wake()

    def wake(self) -> None:
        """Wake the task."""
        self._idle.clear()
        self._wake.set()

    async def _run_step(self) -> None:
        if self._deletions:
            if await self._deletions.run_next():
                self._stored.clear()
        elif self._tier.corrupt_records:
            await self._tier.remove_corrupt()
            self._stored.clear()
        else:
            await self._send(self._batch())

    def _batch(self) -> list[Chunk]:
        """Return the next chunks of one tenant."""
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
            # The chunks return to the front of the queue; the try counts only if the call reached the backend.
            more = 0 if isinstance(error, RemoteBusy) else 1
            for chunk in reversed(batch):
                if (
                    tries[chunk.key] + more < _MAX_TRIES
                    and chunk.indexed
                    and not self._deletions.is_deleting(chunk.root)
                ):
                    self._queue[chunk.key] = chunk, tries[chunk.key] + more
                    self._queue.move_to_end(chunk.key, last=False)
                else:
                    self.counters.dropped += 1
            raise
        finally:
            self._num_in_flight = 0

    async def push(self, batch: Sequence[Chunk]) -> tuple[list[Chunk], int]:
        """Write chunks of one tenant now, regardless of the write mode; the caller leases them.

        Returns the chunks written, and the number that the backend already had. Raises RemoteFailed.
        """
        async with self.write_lock:
            if self._deletions.is_deleting(batch[0].root):
                raise RemoteFailed("a deletion of this tenant is not done there yet")
            for chunk in batch:
                self._queue.pop(chunk.key, None)
            return await self._write(batch, by_command=True)

    async def _write(self, batch: Sequence[Chunk], by_command: bool = False) -> tuple[list[Chunk], int]:
        """Write a batch. Returns the chunks written, and the number that already existed.

        With ``by_command``, chunks are written even shortly after the backend lost its data.
        """
        root = batch[0].root
        parents = [c.parent_key for c in batch if not c.is_first]
        asked = list(dict.fromkeys([*(c.key for c in batch), *parents]))
        found = await self._tier.find(root, asked, _LOOKUP_TIMEOUT_SECONDS)
        if found.record_epoch is None:
            await self._tier.create_tenant_epoch(root)
            found = await self._tier.find(root, asked, _LOOKUP_TIMEOUT_SECONDS)
        if found.record_epoch is None:
            raise RemoteFailed("it does not keep what it is given")
        news = self._epochs.observe(root, found.epochs)
        if news is EpochChange.EPOCH_LOST and not by_command:
            self.counters.withheld += len(batch)
            return [], 0
        if news not in (EpochChange.NONE, EpochChange.EPOCH_LOST):
            self.counters.dropped += len(batch)
            return [], 0
        found_records = {key: record for key, record in zip(asked, found.records, strict=True) if record is not None}
        there = set(found_records)
        for key in set(asked) - there:  # also parents that are not in the batch: their next use writes them
            self.forget_stored(key)
        fresh, known = list[Chunk](), 0
        for chunk in batch:
            record = found_records.get(chunk.key)
            if record is not None and self._tier.outlives_half_ttl(record, self._ttl_of(chunk)):
                self._record_stored(chunk.key, self._tier.seconds_left(record))
                known += 1
            elif self._is_sendable(chunk, by_command) and (chunk.is_first or chunk.parent_key in there):
                fresh.append(chunk)
                there.add(chunk.key)
            else:
                self.counters.dropped += 1
        if not fresh:
            return [], known
        lease = LeaseGuard(fresh, self._tiers.on_released)
        try:
            outgoing = await self._run_in_thread(self._encode_work(fresh, found.record_epoch))
        finally:
            lease.release()
        await self._tier.store(outgoing)
        for out in outgoing:
            self._record_stored(out.header.prefix_hash, inf if out.ttl_seconds is None else out.ttl_seconds)
        return fresh, known

    def _is_sendable(self, chunk: Chunk, by_command: bool) -> bool:
        is_from_before = self._epochs.predates_deletion(chunk) or (not by_command and self._epochs.is_withheld(chunk))
        return chunk.indexed and chunk.arena_state is Residency.PRESENT and not is_from_before

    def _encode_work(self, chunks: Sequence[Chunk], mark: bytes) -> Callable[[], list[EncodedChunk]]:
        """Return the encoding work for a thread; it uses no mutable state of the event loop."""
        jobs: list[tuple[ChunkHeader, Slot, int | None]] = []
        for chunk in chunks:
            assert chunk.slot is not None, "a resident has a slot"
            jobs.append((chunk.full_header(), chunk.slot, self._ttl_of(chunk)))
        arena, cipher, plane_compressor = self._tiers.arena, self._tier.cipher, self._plane_compressor

        def work() -> list[EncodedChunk]:
            out = []
            for header, slot, ttl in jobs:
                kind, stored = encode_payload(cipher, header, arena.read(slot), plane_compressor)
                out.append(EncodedChunk(header, kind, stored, keys.checksum(stored), ttl, mark))
            return out

        return work
