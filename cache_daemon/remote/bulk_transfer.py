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
from cache_daemon.remote.deletion_epochs import News
from cache_daemon.remote.fetch import Asking, Bringing, Wanted
from cache_daemon.remote.fetch_insert import Placing
from cache_daemon.remote.remote_record import Entry
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.write_behind import Sending
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.sessions import Hold
from cache_daemon.store.tier_manager import Tiers
from cache_daemon.store.yield_timer import Turns

_BATCH_CHUNKS, _BATCH_BYTES, _SHARE_OF_ARENA = 64, 16 << 20, 4
_LOOK_SECONDS, _READ_SECONDS = 5.0, 30.0
# A full arena may be full of chunks that are being written to disk: so often it is waited for, and so long each time.
# When that was in vain, what comes next is not waited for until something has found room.
_TRIES, _PATIENCE_SECONDS = 40, 0.25


@dataclass(frozen=True)
class Carried:
    """Chunks: of ``total`` those that are ``done``, and what became of them; and the bytes of their payloads."""

    total: int = 0
    chunks: int = 0
    payload_bytes: int = 0
    known: int = 0
    lost: int = 0

    @property
    def done(self) -> int:
        return self.chunks + self.known + self.lost


class Carrying:
    """``hold`` brings a chunk into the arena and keeps it there, None when it cannot; ``progress`` waits until the
    durable tier has taken something."""

    def __init__(
        self,
        tiers: Tiers,
        tier: RemoteTier,
        sending: Sending,
        bringing: Bringing,
        placing: Placing,
        hold: Callable[[Chunk], Awaitable[Hold | None]],
        progress: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._tiers, self._tier, self._sending = tiers, tier, sending
        self._bringing, self._placing = bringing, placing
        self._hold, self._progress = hold, progress

    # ---- there ----------------------------------------------------------------------------------------------

    async def push(self, chunks: Sequence[Chunk]) -> AsyncIterator[Carried]:
        """Writes a tenant's chunks to the tier. Raises Unavailable."""
        carried = Carried(len(chunks))
        yield carried
        # A chunk begins behind the beginning of what it continues.
        for batch in self._batches(sorted(chunks, key=lambda chunk: chunk.start_position)):
            with _told(carried):
                written, known = await self._push(batch)
            carried = replace(
                carried,
                chunks=carried.chunks + len(written),
                payload_bytes=carried.payload_bytes + sum(chunk.size_bytes for chunk in written),
                known=carried.known + known,
                lost=carried.lost + len(batch) - len(written) - known,
            )
            yield carried

    async def _push(self, batch: Sequence[Chunk]) -> tuple[Sequence[Chunk], int]:
        holds: list[Hold] = []
        try:
            for chunk in batch:
                hold = await self._hold(chunk) if chunk.listed else None
                if hold is not None:
                    holds.append(hold)
            held = [chunk for hold in holds for chunk in hold.chunks]
            return await self._sending.push(held) if held else ([], 0)
        finally:
            for hold in holds:
                hold.give_back()

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

    async def pull(self, root: bytes, tenant: bytes, geometry: Geometry) -> AsyncIterator[Carried]:
        """Lists here what the tier has of a tenant. Raises Unavailable."""
        wanted = Wanted(root, tenant, geometry, b"", (), 0.0, 0.0)
        with _told(Carried()):
            missing, known = await self._missing(wanted)
        carried = Carried(len(missing) + known, known=known)
        yield carried
        patience = _Patience()
        for at in range(0, len(missing), _BATCH_CHUNKS):
            some = missing[at : at + _BATCH_CHUNKS]
            with _told(carried), self._bringing.asking(root) as asking:
                placed = await self._pull(wanted, asking, some, patience)
            carried = replace(
                carried,
                chunks=carried.chunks + len(placed),
                payload_bytes=carried.payload_bytes + sum(placed),
                lost=carried.lost + len(some) - len(placed),
            )
            yield carried

    async def _missing(self, wanted: Wanted) -> tuple[list[bytes], int]:
        """The hashes of sound chunks that are not here, parents before children, and how many are here."""
        found: list[tuple[int, bytes]] = []
        known, turns = 0, Turns()
        hashes = await self._tier.listed(wanted.root)
        for at in range(0, len(hashes), _BATCH_CHUNKS):
            for entry in await self._entries(wanted, hashes[at : at + _BATCH_CHUNKS]):
                await turns.give_way()
                key = entry.header.prefix_hash
                if self._tiers.index.get(key) is None:
                    found.append((entry.header.start_position, key))
                else:
                    known += 1
        return [key for _, key in sorted(found)], known

    async def _entries(self, wanted: Wanted, hashes: Sequence[bytes]) -> list[Entry]:
        found = await self._tier.find(wanted.root, hashes, _LOOK_SECONDS)
        if self._sending.seen(wanted.root, found.marks) is News.REVERTED:
            return []
        return [entry for entry in found.entries if entry is not None and wanted.fits(entry.header)]

    async def _pull(self, wanted: Wanted, asking: Asking, hashes: Sequence[bytes], patience: _Patience) -> list[int]:
        """Lists chunks. Returns the sizes of those that are here now."""
        placed: list[int] = []
        for group in self._tier.groups(await self._entries(wanted, hashes)):
            payloads = await self._tier.parts(group, _READ_SECONDS)
            for entry, parts in zip(group, payloads, strict=True):
                # Nobody asks for it now, so it is kept no longer than it would have been there.
                kept = replace(wanted, until=self._tiers.clock() + self._tier.left(entry))
                if await self._place(kept, asking, entry, parts, patience):
                    placed.append(entry.header.payload_bytes)
        return placed

    async def _place(
        self, wanted: Wanted, asking: Asking, entry: Entry, parts: list[bytes] | None, patience: _Patience
    ) -> bool:
        while True:
            hold = Hold([], self._tiers.unused)
            try:
                if await self._placing.place(wanted, [entry], [parts], hold, lambda: asking.void, awaited=False):
                    patience.tries = _TRIES
                    return True
            finally:
                hold.give_back()
            lost = parts is None or asking.void or not self._placing.continues(wanted.root, entry)
            if lost or not patience.tries or not await self._progress(_PATIENCE_SECONDS):
                return False
            patience.tries -= 1


@dataclass
class _Patience:
    """How often room is waited for still."""

    tries: int = _TRIES


@contextmanager
def _told(carried: Carried) -> Iterator[None]:
    """What of the tier failed, and how far it had come."""
    try:
        yield
    except RemoteFailed as error:
        raise Unavailable(
            f"the remote tier fails: {error}; {carried.done} of {carried.total} chunks were done, and are not carried "
            f"again when you try again"
        ) from error
