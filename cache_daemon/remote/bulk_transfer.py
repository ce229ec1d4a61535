"""Carrying all that is stored of a tenant to the remote tier, or from there, because somebody said so.

What is there is not sent again, so whoever meets a failure starts again. Writes and deletions of this node take turns
with it, and what a tenant deletes meanwhile neither goes nor comes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import Unavailable

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import EpochChange
from cache_daemon.remote.fetch import FetchRequest, InflightLookup, RemotePrefetcher
from cache_daemon.remote.fetch_insert import RemoteChunkInserter
from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.write_behind import WriteBehindQueue
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.sessions import LeaseGuard
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

_BATCH_CHUNKS, _BATCH_BYTES, _SHARE_OF_ARENA = 64, 16 << 20, 4
_LOOKUP_TIMEOUT_SECONDS, _READ_TIMEOUT_SECONDS = 5.0, 30.0
# A full arena may be full of chunks that are being written to disk: so often it is waited for, and so long each time.
# When that was in vain, what comes next is not waited for until something has found room.
_MAX_WAITS, _WAIT_SECONDS = 40, 0.25


@dataclass(frozen=True)
class TransferProgress:
    """Chunks: of ``total`` those that are ``done``, and what became of them; and the bytes of their payloads."""

    total: int = 0
    chunks: int = 0
    payload_bytes: int = 0
    known: int = 0
    lost: int = 0

    @property
    def done(self) -> int:
        return self.chunks + self.known + self.lost


class TenantTransfer:
    """``hold`` brings a chunk into the arena and keeps it there, None when it cannot; ``progress`` waits until the
    durable tier has taken something."""

    def __init__(
        self,
        tiers: TierManager,
        tier: RemoteTier,
        sending: WriteBehindQueue,
        bringing: RemotePrefetcher,
        placing: RemoteChunkInserter,
        hold: Callable[[Chunk], Awaitable[LeaseGuard | None]],
        progress: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._tiers, self._tier, self._write_behind = tiers, tier, sending
        self._prefetcher, self._inserter = bringing, placing
        self._acquire, self._wait_progress = hold, progress

    # ---- there ----------------------------------------------------------------------------------------------

    async def push(self, chunks: Sequence[Chunk]) -> AsyncIterator[TransferProgress]:
        """Writes a tenant's chunks to the tier. Raises Unavailable."""
        carried = TransferProgress(len(chunks))
        yield carried
        # A chunk begins behind the beginning of what it continues.
        for batch in self._batches(sorted(chunks, key=lambda chunk: chunk.start_position)):
            with _as_unavailable(carried):
                written, known = await self._push_batch(batch)
            carried = replace(
                carried,
                chunks=carried.chunks + len(written),
                payload_bytes=carried.payload_bytes + sum(chunk.size_bytes for chunk in written),
                known=carried.known + known,
                lost=carried.lost + len(batch) - len(written) - known,
            )
            yield carried

    async def _push_batch(self, batch: Sequence[Chunk]) -> tuple[Sequence[Chunk], int]:
        holds: list[LeaseGuard] = []
        try:
            for chunk in batch:
                hold = await self._acquire(chunk) if chunk.indexed else None
                if hold is not None:
                    holds.append(hold)
            held = [chunk for hold in holds for chunk in hold.chunks]
            return await self._write_behind.push(held) if held else ([], 0)
        finally:
            for hold in holds:
                hold.release()

    def _batches(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """As many at once as may be held in the arena beside all else."""
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

    # ---- and back -------------------------------------------------------------------------------------------

    async def pull(self, root: bytes, tenant: bytes, geometry: Geometry) -> AsyncIterator[TransferProgress]:
        """Lists here what the tier has of a tenant. Raises Unavailable."""
        wanted = FetchRequest(root, tenant, geometry, b"", (), 0.0, 0.0)
        with _as_unavailable(TransferProgress()):
            missing, known = await self._missing_chunks(wanted)
        carried = TransferProgress(len(missing) + known, known=known)
        yield carried
        patience = _WaitBudget()
        for at in range(0, len(missing), _BATCH_CHUNKS):
            some = missing[at : at + _BATCH_CHUNKS]
            with _as_unavailable(carried), self._prefetcher.track_lookup(root) as asking:
                placed = await self._pull_batch(wanted, asking, some, patience)
            carried = replace(
                carried,
                chunks=carried.chunks + len(placed),
                payload_bytes=carried.payload_bytes + sum(placed),
                lost=carried.lost + len(some) - len(placed),
            )
            yield carried

    async def _missing_chunks(self, wanted: FetchRequest) -> tuple[list[bytes], int]:
        """The hashes of sound chunks that are not here, parents before children, and how many are here."""
        found: list[tuple[int, bytes]] = []
        known, turns = 0, YieldTimer()
        hashes = await self._tier.list_prefix_hashes(wanted.root)
        for at in range(0, len(hashes), _BATCH_CHUNKS):
            for entry in await self._find_records(wanted, hashes[at : at + _BATCH_CHUNKS]):
                await turns.maybe_yield()
                key = entry.header.prefix_hash
                if self._tiers.index.get(key) is None:
                    found.append((entry.header.start_position, key))
                else:
                    known += 1
        return [key for _, key in sorted(found)], known

    async def _find_records(self, wanted: FetchRequest, hashes: Sequence[bytes]) -> list[RemoteRecord]:
        found = await self._tier.find(wanted.root, hashes, _LOOKUP_TIMEOUT_SECONDS)
        if self._write_behind.observe_epochs(wanted.root, found.epochs) is EpochChange.DELETION_LOST:
            return []
        return [entry for entry in found.records if entry is not None and wanted.accepts(entry.header)]

    async def _pull_batch(
        self, wanted: FetchRequest, asking: InflightLookup, hashes: Sequence[bytes], patience: _WaitBudget
    ) -> list[int]:
        """Lists chunks. Returns the sizes of those that are here now."""
        placed: list[int] = []
        for group in self._tier.group_by_call(await self._find_records(wanted, hashes)):
            payloads = await self._tier.read_payloads(group, _READ_TIMEOUT_SECONDS)
            for entry, parts in zip(group, payloads, strict=True):
                # Nobody asks for it now, so it is kept no longer than it would have been there.
                kept = replace(wanted, expires_at=self._tiers.clock() + self._tier.seconds_left(entry))
                if await self._insert(kept, asking, entry, parts, patience):
                    placed.append(entry.header.payload_bytes)
        return placed

    async def _insert(
        self,
        wanted: FetchRequest,
        asking: InflightLookup,
        entry: RemoteRecord,
        parts: list[bytes] | None,
        patience: _WaitBudget,
    ) -> bool:
        while True:
            hold = LeaseGuard([], self._tiers.on_released)
            try:
                if await self._inserter.insert(
                    wanted, [entry], [parts], hold, lambda: asking.invalidated, delay_persist=False
                ):
                    patience.waits_left = _MAX_WAITS
                    return True
            finally:
                hold.release()
            lost = parts is None or asking.invalidated or not self._inserter.parent_is_live(wanted.root, entry)
            if lost or not patience.waits_left or not await self._wait_progress(_WAIT_SECONDS):
                return False
            patience.waits_left -= 1


@dataclass
class _WaitBudget:
    """How often room is waited for still."""

    waits_left: int = _MAX_WAITS


@contextmanager
def _as_unavailable(carried: TransferProgress) -> Iterator[None]:
    """What of the tier failed, and how far it had come."""
    try:
        yield
    except RemoteFailed as error:
        raise Unavailable(
            f"the remote tier fails: {error}; {carried.done} of {carried.total} chunks were done, and are not carried "
            f"again when you try again"
        ) from error
