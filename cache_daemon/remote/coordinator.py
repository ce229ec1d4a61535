"""The remote tier of one store: fetches, write-behind, deletions and health probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.remote import deletion_epochs, tombstones
from cache_daemon.remote.bulk_transfer import TenantTransfer
from cache_daemon.remote.deletion_epochs import DeletionEpochs
from cache_daemon.remote.fetch_request import FetchRequest, FetchResult, InflightLookups
from cache_daemon.remote.health_probe import HealthProbe
from cache_daemon.remote.remote_chunk_inserter import RemoteChunkInserter
from cache_daemon.remote.remote_prefetcher import RemotePrefetcher
from cache_daemon.remote.remote_refill import RemoteRefill
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.tombstone_sync import TombstoneApplier
from cache_daemon.remote.tombstones import DeletionWriter
from cache_daemon.remote.write_behind import RemoteWrite, WriteBehindQueue, WritePolicy
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.chunk_list import ChunkList
from cache_daemon.store.lookup import FetchHints
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.sessions import Session
from cache_daemon.store.store_services import StoreServices

_THREADS = 2
# Time limits in seconds: of draining the queue in ``close``, and of waiting for the backend in ``await_deletion``.
_STOP_SECONDS, _DELETE_SECONDS = 2.0, 2.0


@dataclass(frozen=True)
class RemoteSettings:
    """A remote tier and its write policy.

    If ``ttl_seconds`` is None, chunks have no expiry in the backend, which evicts them by its own policy.
    """

    tier: RemoteTier
    write: RemoteWrite = "second-use"
    ttl_seconds: int | None = None
    compress: bool = True

    def new_coordinator(self, services: StoreServices) -> RemoteCoordinator:
        """Attach the tier to a store, whose constructor calls this."""
        return RemoteCoordinator(self, services)


class RemoteCoordinator:
    """Owner of the remote tier's parts and their tasks, from ``start`` to ``close``."""

    def __init__(self, settings: RemoteSettings, services: StoreServices) -> None:
        tiers, tier = services.tiers, settings.tier
        self._span, self._tier, self._threads = services.threads.span, tier, ThreadPoolExecutor(_THREADS, "remote")
        run_in_executor = asyncio.get_running_loop().run_in_executor
        self._epochs = DeletionEpochs(tiers.write_note, tiers.index.has_chunks_of)
        self._deletions = DeletionWriter(tier, self._epochs, tiers.write_note)
        self._lookups = InflightLookups(self._deletions)
        self._write_behind = WriteBehindQueue(
            tiers,
            tier,
            WritePolicy(settings.write, settings.ttl_seconds, settings.compress),
            self._epochs,
            self._deletions,
            lambda work: run_in_executor(self._threads, work),
        )
        inserter = RemoteChunkInserter(
            services.inserter,
            tier,
            lambda work: run_in_executor(self._threads, work),
            self._write_behind.record_stored,
        )
        self._prefetcher = RemotePrefetcher(tiers, inserter, tier, self._epochs, self._lookups)
        self._tombstones = TombstoneApplier(
            tier, self._epochs, self._deletions, self._write_behind, services.deleter, self._lookups
        )
        self._refill = RemoteRefill(ChunkList(tiers.index), self._write_behind)
        self._epochs.on_change.append(self._refill.on_epoch_change)
        self.transfer = TenantTransfer(services, tier, self._write_behind, inserter, self._epochs, self._lookups)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the background tasks."""
        probe = HealthProbe(self._tier, lambda: self._write_behind.has_to_write)
        work = (probe.run(), self._write_behind.run(), self._tombstones.run(), self._refill.run())
        self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        """Drain the write-behind queue for ``_STOP_SECONDS``, end the tasks, and close the backend."""
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
        self, session: Session, tenant_salt: bytes, ids: bytes, hints: FetchHints, kept: PromptHints = NO_HINTS
    ) -> FetchResult:
        """Extend the locally stored prefix of a prompt with chunks of the remote tier.

        Raises nothing. Cancelling the caller leaves no slots or leases behind.
        """
        root, tenant = keys.tenant_root(session.namespace, tenant_salt), keys.tenant_id(tenant_salt)
        with self._span("remote read"):
            request = FetchRequest(root, tenant, session.geometry, ids, hints, kept, session.usage)
            result = await self._prefetcher.fetch(request)
        self._write_behind.wake_for_corrupt()
        return result

    def enqueue_used(self, chunks: Iterable[Chunk]) -> None:
        """Enqueue the chunks that a prompt used; see ``WriteBehindQueue.enqueue_used``."""
        self._write_behind.enqueue_used(chunks)

    def delete(
        self, root: bytes, key: bytes, *, is_known: bool = True, owner: Hashable | None = None
    ) -> asyncio.Future[int]:
        """Enqueue a deletion, and stop reads and writes of the chunks to delete.

        See ``DeletionWriter.enqueue``.
        """
        done = self._deletions.enqueue(root, key, is_known=is_known, owner=owner)
        self._write_behind.on_deletion(root, key)
        self._lookups.invalidate(root)
        return done

    @staticmethod
    async def await_deletion(deletion: asyncio.Future[int]) -> int:
        """Wait for a deletion, at most ``_DELETE_SECONDS``.

        If the backend does not answer, the deletion is retried later. Returns the number of deleted chunks; 0 if
        unknown.
        """
        await asyncio.wait({deletion}, timeout=_DELETE_SECONDS)
        return deletion.result() if deletion.done() else 0

    def restore_note(self, name: bytes, value: bytes) -> None:
        """Restore a note of an earlier start; notes of other components are ignored."""
        if name.startswith(tombstones.NOTE_PREFIX):
            self._deletions.restore_note(name)
            self._write_behind.wake()
        elif name.startswith((deletion_epochs.NOTE_PREFIX, deletion_epochs.TOMBSTONES_PREFIX)):
            self._epochs.restore(name, value)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic seconds) of an outage for reading or writing; None while both work.

        Failing writes are no outage of a node that writes nothing and has no deletions to write.
        """
        used = (self._tier.reads, self._tier.writes) if self._write_behind.has_to_write else (self._tier.reads,)
        for breaker in used:
            if not breaker.allows_calls:
                return breaker.reason, breaker.failing_since
        return None

    async def settle(self) -> None:
        """Wait until the write-behind queue is empty, or blocked."""
        await self._write_behind.settle()

    def write_to(self, out: StatsResponse) -> None:
        """Fill the remote tier's fields of the statistics."""
        tier, fetches, queue = self._tier, self._prefetcher.counters, self._write_behind
        out.remote_engine = tier.backend.name
        out.remote_failing = self.failing[0] if self.failing else ""
        out.remote_lookups, out.remote_hits, out.remote_tokens = fetches.lookups, fetches.hits, fetches.tokens
        out.remote_bypassed, out.remote_late = fetches.bypassed, fetches.late
        out.remote_read_bytes, out.remote_written_bytes = tier.counters.read_bytes, tier.counters.written_bytes
        out.remote_written_chunks, out.remote_pending = tier.counters.written_chunks, queue.pending
        out.remote_dropped, out.remote_deletions = queue.counters.dropped, len(self._deletions)
        out.remote_failures, out.remote_rejected = tier.counters.failures, tier.counters.rejected
        out.remote_hedged = tier.hedged_reads.num_hedged
        out.remote_opened = tier.reads.num_opened + tier.writes.num_opened
        out.remote_withheld, out.remote_restored_deletions = queue.counters.withheld, self._tombstones.num_restored
        out.remote_data_losses, out.remote_refilling_tenants = self._refill.num_losses, self._refill.num_tenants
        out.remote_latency_ms = tier.latency.latency_seconds * 1e3
        out.remote_bytes_per_second = tier.latency.bytes_per_second
