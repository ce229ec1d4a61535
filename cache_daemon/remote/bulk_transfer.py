"""Bulk transfer of a tenant to or from the remote tier.

An operator's command starts it. Chunks that the target already has are not sent again, so an operator simply repeats a
failed transfer. A push writes its batches only between other writes and deletions of this node. Chunks that are deleted
during the transfer are not transferred.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import Unavailable

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.fetch_request import FetchRequest, InflightLookup, InflightLookups
from cache_daemon.remote.remote_chunk_inserter import RemoteChunkInserter
from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.write_behind import WriteBehindQueue
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.lookup import FetchHints
from cache_daemon.store.prompt_hints import PromptHints
from cache_daemon.store.store_services import StoreServices
from cache_daemon.store.yield_timer import YieldTimer

_BATCH_CHUNKS, _BATCH_BYTES, _SHARE_OF_ARENA = 64, 16 << 20, 4
_LOOKUP_TIMEOUT_SECONDS, _READ_TIMEOUT_SECONDS = 5.0, 30.0
# Number and length of waits while the arena is full, possibly of chunks that are being written to disk. When all waits
# are used, further chunks do not wait, until a chunk has been inserted.
_MAX_WAITS, _WAIT_SECONDS = 40, 0.25


@dataclass(frozen=True)
class TransferProgress:
    """Progress of a transfer: numbers of chunks by result, and transferred payload bytes."""

    total: int = 0
    chunks: int = 0
    payload_bytes: int = 0
    known: int = 0
    lost: int = 0

    @property
    def done(self) -> int:
        return self.chunks + self.known + self.lost


class TenantTransfer:
    """Pushes a tenant's chunks to the remote tier, or pulls them from it.

    Runs on the event loop.
    """

    def __init__(
        self,
        services: StoreServices,
        tier: RemoteTier,
        write_behind: WriteBehindQueue,
        inserter: RemoteChunkInserter,
        epochs: DeletionEpochs,
        lookups: InflightLookups,
    ) -> None:
        self._tiers, self._services, self._tier = services.tiers, services, tier
        self._write_behind, self._inserter, self._epochs, self._lookups = write_behind, inserter, epochs, lookups

    # ---- push -----------------------------------------------------------------------------------------------

    async def push(self, chunks: Sequence[Chunk]) -> AsyncIterator[TransferProgress]:
        """Write a tenant's chunks to the tier. Raises Unavailable."""
        progress = TransferProgress(len(chunks))
        yield progress
        # A child's start_position is greater than its parent's, so sorting by it yields parents first.
        for batch in self._batches(sorted(chunks, key=lambda chunk: chunk.start_position)):
            with _as_unavailable(progress):
                written, known = await self._push_batch(batch)
            progress = replace(
                progress,
                chunks=progress.chunks + len(written),
                payload_bytes=progress.payload_bytes + sum(chunk.size_bytes for chunk in written),
                known=progress.known + known,
                lost=progress.lost + len(batch) - len(written) - known,
            )
            yield progress

    async def _push_batch(self, batch: Sequence[Chunk]) -> tuple[Sequence[Chunk], int]:
        leases: list[LeaseGuard] = []
        try:
            for chunk in batch:
                lease = await self._services.lookup.acquire(chunk) if chunk.indexed else None
                if lease is not None:
                    leases.append(lease)
            held = [chunk for lease in leases for chunk in lease.chunks]
            return await self._write_behind.push(held) if held else ([], 0)
        finally:
            for lease in leases:
                lease.release()

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """Split chunks into batches that need only a part of the arena."""
        most = min(_BATCH_BYTES, self._tiers.arena.size_bytes // _SHARE_OF_ARENA)
        batch: list[Chunk] = []
        size = 0
        for chunk in chunks:
            if batch and (len(batch) == _BATCH_CHUNKS or size + chunk.size_bytes > most):
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += chunk.size_bytes
        if batch:
            yield batch

    # ---- pull -----------------------------------------------------------------------------------------------

    async def pull(self, root: bytes, tenant: bytes, geometry: Geometry) -> AsyncIterator[TransferProgress]:
        """Insert a tenant's chunks from the remote tier into this node. Raises Unavailable."""
        request = FetchRequest(root, tenant, geometry, b"", FetchHints())
        with _as_unavailable(TransferProgress()):
            missing, known = await self._missing_chunks(request)
        progress = TransferProgress(len(missing) + known, known=known)
        yield progress
        budget = _WaitBudget()
        for at in range(0, len(missing), _BATCH_CHUNKS):
            batch_keys = missing[at : at + _BATCH_CHUNKS]
            with _as_unavailable(progress), self._lookups.track(root) as lookup:
                placed = await self._pull_batch(request, lookup, batch_keys, budget)
            progress = replace(
                progress,
                chunks=progress.chunks + len(placed),
                payload_bytes=progress.payload_bytes + sum(placed),
                lost=progress.lost + len(batch_keys) - len(placed),
            )
            yield progress

    async def _missing_chunks(self, request: FetchRequest) -> tuple[list[bytes], int]:
        """Return the hashes of valid chunks that this node lacks, parents first.

        Also returns the number of valid chunks that this node already has.
        """
        found: list[tuple[int, bytes]] = []
        known, yield_timer = 0, YieldTimer()
        hashes = await self._tier.list_prefix_hashes(request.root)
        for at in range(0, len(hashes), _BATCH_CHUNKS):
            for entry in await self._find_records(request, hashes[at : at + _BATCH_CHUNKS]):
                await yield_timer.maybe_yield()
                key = entry.header.prefix_hash
                if self._tiers.index.get(key) is None:
                    found.append((entry.header.start_position, key))
                else:
                    known += 1
        return [key for _, key in sorted(found)], known

    async def _find_records(self, request: FetchRequest, hashes: Sequence[bytes]) -> list[RemoteRecord]:
        found = await self._tier.find(request.root, hashes, _LOOKUP_TIMEOUT_SECONDS)
        if self._epochs.observe(request.root, found.epochs) is EpochChange.DELETION_LOST:
            return []
        return [entry for entry in found.records if entry is not None and request.accepts(entry.header)]

    async def _pull_batch(
        self, request: FetchRequest, lookup: InflightLookup, hashes: Sequence[bytes], budget: _WaitBudget
    ) -> list[int]:
        """Insert chunks. Returns the payload sizes of the inserted chunks."""
        placed: list[int] = []
        for group in self._tier.group_by_call(await self._find_records(request, hashes)):
            payloads = await self._tier.read_payloads(group, _READ_TIMEOUT_SECONDS)
            for entry, parts in zip(group, payloads, strict=True):
                # No request sets a TTL, so the chunk expires here when it would have expired in the remote tier.
                deadline = self._tiers.clock() + self._tier.seconds_left(entry)
                kept = replace(request, kept=PromptHints(deadline))
                if await self._insert(kept, lookup, entry, parts, budget):
                    placed.append(entry.header.payload_bytes)
        return placed

    async def _insert(
        self,
        request: FetchRequest,
        lookup: InflightLookup,
        entry: RemoteRecord,
        parts: list[bytes] | None,
        budget: _WaitBudget,
    ) -> bool:
        while True:
            lease = LeaseGuard([], self._tiers.on_released)
            try:
                if await self._inserter.insert(
                    request, [entry], [parts], lease, lambda: lookup.invalidated, delay_persist=False
                ):
                    budget.waits_left = _MAX_WAITS
                    return True
            finally:
                lease.release()
            lost = parts is None or lookup.invalidated or not self._inserter.parent_is_live(request.root, entry)
            if lost or not budget.waits_left or not await self._services.wait_progress(_WAIT_SECONDS):
                return False
            budget.waits_left -= 1


@dataclass
class _WaitBudget:
    """Remaining number of waits for a full arena."""

    waits_left: int = _MAX_WAITS


@contextmanager
def _as_unavailable(progress: TransferProgress) -> Iterator[None]:
    """Translate RemoteFailed to Unavailable, with the progress so far."""
    try:
        yield
    except RemoteFailed as error:
        raise Unavailable(
            f"the remote tier fails: {error}; {progress.done} of {progress.total} chunks were done, and are not "
            f"transferred again when you try again"
        ) from error
