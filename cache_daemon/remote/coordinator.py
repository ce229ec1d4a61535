"""The store's side of a remote tier: one object that brings, sends, deletes, and keeps an eye on the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.remote import deletion_epochs
from cache_daemon.remote.bulk_transfer import TenantTransfer
from cache_daemon.remote.deletion_epochs import DeletionEpochs
from cache_daemon.remote.fetch import FetchRequest, FetchResult, RemotePrefetcher
from cache_daemon.remote.fetch_insert import RemoteChunkInserter
from cache_daemon.remote.health_probe import HealthProbe
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.tombstone_sync import TombstoneApplier
from cache_daemon.remote.write_behind import NOTE_PREFIX, RemoteWrite, WriteBehindQueue
from cache_daemon.store.bulk_ops import BulkOps
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.sessions import LeaseGuard, Session

_THREADS = 2
# What waits is sent for so long at the end, and a caller that deletes waits so long for the engine.
_STOP_SECONDS, _DELETE_SECONDS = 2.0, 2.0


@dataclass(frozen=True)
class RemoteSettings:
    """A tier and what is done with it. ``ttl_seconds`` None keeps chunks for as long as the engine likes."""

    tier: RemoteTier
    write: RemoteWrite = "second-use"
    ttl_seconds: int | None = None
    compress: bool = True


class RemoteCoordinator:
    """Of one store. ``note`` keeps a small value for the next start; None deletes it. ``around`` surrounds reads, which
    it is told the name of."""

    def __init__(
        self,
        settings: RemoteSettings,
        walks: BulkOps,
        inserter: ChunkInserter,
        note: Callable[[bytes, bytes | None], None],
        hold: Callable[[Chunk], Awaitable[LeaseGuard | None]],
        progress: Callable[[float], Awaitable[bool]],
        around: Callable[[str], contextlib.AbstractContextManager[object]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        """``hold`` and ``progress`` are as for ``Carrying``."""
        self._around = around
        self._tier, self._threads = settings.tier, ThreadPoolExecutor(_THREADS, "remote")
        in_thread, tiers = asyncio.get_running_loop().run_in_executor, walks.tiers
        self._epochs = DeletionEpochs(note)
        self._write_behind = WriteBehindQueue(
            tiers, settings.tier, settings.write, settings.ttl_seconds, settings.compress,
            lambda work: in_thread(self._threads, work), note, self._epochs,
            lambda *change: self._tombstones.on_epoch_change(*change),
        )  # fmt: skip
        placing = RemoteChunkInserter(
            tiers,
            inserter,
            settings.tier,
            lambda work: in_thread(self._threads, work),
            self._write_behind.record_stored,
        )
        self._prefetcher = RemotePrefetcher(
            tiers, placing, settings.tier, self._write_behind.observe_epochs, self._write_behind.is_deleting
        )
        self._tombstones = TombstoneApplier(
            settings.tier, self._epochs, self._write_behind, walks, self._prefetcher.invalidate
        )
        self.transfer = TenantTransfer(
            tiers, settings.tier, self._write_behind, self._prefetcher, placing, hold, progress
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        work = (HealthProbe(self._tier).run(), self._write_behind.run(), self._tombstones.run())
        self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        """Sends what waits, for a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._write_behind.settle()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._prefetcher.close()
        await self._tier.backend.close()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)

    async def fetch(
        self,
        session: Session,
        tenant_salt: bytes,
        ids: bytes,
        chunk_ends: Sequence[int],
        seconds_per_token: float,
        timeout_seconds: float,
        expires_at: float = inf,
    ) -> FetchResult:
        """Adds to the prefix of a session's prompt what the tier has of it, as ``Bringing`` and ``Wanted`` say. To be
        called right before ``ChunkStore.match``, so that nothing goes in between."""
        root, tenant = keys.tenant_root(session.namespace, tenant_salt), keys.tenant_id(tenant_salt)
        with self._around("remote read"):
            wanted = FetchRequest(
                root, tenant, session.geometry, ids, chunk_ends, seconds_per_token, timeout_seconds, expires_at
            )
            brought = await self._prefetcher.fetch(wanted)
        self._write_behind.wake_for_corrupt()
        return brought

    def enqueue_used(self, chunks: Iterable[Chunk]) -> None:
        """See ``Sending.used``."""
        self._write_behind.enqueue_used(chunks)

    def delete(self, root: bytes, key: bytes, known: bool = True) -> asyncio.Future[int]:
        """See ``Sending.forget``. What is being brought of the tenant does not come any more."""
        done = self._write_behind.delete(root, key, known)
        self._prefetcher.invalidate(root)
        return done

    @staticmethod
    async def await_deletion(deletion: asyncio.Future[int]) -> int:
        """Returns when a deletion is done or, if the engine does not answer, after a moment: it is done later then.
        Returns the chunks that went, as far as that is known."""
        await asyncio.wait({deletion}, timeout=_DELETE_SECONDS)
        return deletion.result() if deletion.done() else 0

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start, if it is one of ours."""
        if name.startswith(NOTE_PREFIX):
            self._write_behind.restore(name)
        elif name.startswith((deletion_epochs.NOTE_PREFIX, deletion_epochs.TOMBSTONES_PREFIX)):
            self._epochs.restore(name, value)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Why the tier is not used, for reading or for writing, and since when (monotonic seconds); None while it
        is."""
        for breaker in (self._tier.reads, self._tier.writes):
            if not breaker.allows_calls:
                return breaker.reason, breaker.failing_since
        return None

    async def settle(self) -> None:
        """Waits until all that can be sent is."""
        await self._write_behind.settle()

    def write_to(self, out: StatsResponse) -> None:
        """Writes the tier's part of the statistics."""
        tier, bringing, sending = self._tier, self._prefetcher.counters, self._write_behind
        out.remote_engine = tier.backend.name
        out.remote_failing = self.failing[0] if self.failing else ""
        out.remote_lookups, out.remote_hits, out.remote_tokens = bringing.lookups, bringing.hits, bringing.tokens
        out.remote_bypassed, out.remote_late = bringing.bypassed, bringing.late
        out.remote_read_bytes, out.remote_written_bytes = tier.counters.read_bytes, tier.counters.written_bytes
        out.remote_written_chunks, out.remote_pending = tier.counters.written_chunks, sending.pending
        out.remote_dropped, out.remote_deletions = sending.counters.dropped, sending.deletions
        out.remote_failures, out.remote_rejected = tier.counters.failures, tier.counters.rejected
        out.remote_hedged, out.remote_opened = (
            tier.hedged_reads.num_hedged,
            tier.reads.num_opened + tier.writes.num_opened,
        )
        out.remote_withheld, out.remote_restored_deletions = sending.counters.withheld, sending.counters.restored
        out.remote_latency_ms = tier.latency.latency_seconds * 1e3
        out.remote_bytes_per_second = tier.latency.bytes_per_second
