"""Chunk deleter: deletes and expires chunks, and waits until the disk has removed them.

Long removals yield to the event loop, so chunks may be added and removed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

from kvsidecar.errors import ChunkNotFound, StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, PutResult
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.chunk_list import ChunkList
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.ttl import TtlIndex
from cache_daemon.store.yield_timer import YieldTimer

# Maximal time that a deletion waits for a disk that fails or hangs, and for a working disk with many chunks to remove.
_REMOVAL_TIMEOUT_SECONDS, _MAX_REMOVAL_SECONDS = 5.0, 30.0


class ChunkDeleter:
    """Deletes the chunks of one store."""

    def __init__(self, tiers: TierManager, ttl: TtlIndex, invalidate: Callable[[bytes, bytes, float], None]) -> None:
        """Create the deleter; ``invalidate`` is ``Reservations.invalidate``, called for every deletion."""
        self.tiers, self._ttl, self._invalidate = tiers, ttl, invalidate
        self._listing = ChunkList(tiers.index)

    async def delete(self, root: bytes, chunk: Chunk | None, before: float = inf) -> int:
        """Remove a chunk with its subtree, a tenant's chunks, or everything.

        With ``chunk`` None it removes all chunks of the tenant or, if ``root`` is empty too, all chunks. Removes only
        chunks that were inserted by ``before`` (monotonic), and their descendants. Invalidates earlier reservations.
        Returns the number of chunks removed.
        """
        self._invalidate(root, chunk.key if chunk is not None else b"", before)
        if chunk is not None:
            return await self._remove_subtree(chunk, LossCause.DELETED, YieldTimer())
        dropped, yield_timer = 0, YieldTimer()
        async for found in self._listing.iter_chunks(root):
            if found.indexed and found.inserted_at <= before:
                dropped += await self._remove_subtree(found, LossCause.DELETED, yield_timer)
        return dropped

    @asynccontextmanager
    async def await_disk_removal(self) -> AsyncIterator[None]:
        """At the end of the ``with`` block, wait until the disk has removed the chunks.

        Waits even if the ``with`` block removed nothing, since another call may have just removed the same chunk.
        Raises StoreUnavailable when the disk does not complete the removal in time.
        """
        try:
            yield
        except ChunkNotFound:
            await self._wait_for_disk()
            raise
        await self._wait_for_disk()

    async def _wait_for_disk(self) -> None:
        writer, began = self.tiers.writer, time.monotonic()
        if writer is None:
            return
        removal, until, transactions = _removal_outcome(writer), began + _REMOVAL_TIMEOUT_SECONDS, writer.transactions
        while True:
            await asyncio.wait({removal}, timeout=max(0.0, until - time.monotonic()))
            if removal.done():
                if removal.result() is PutOutcome.STORED:
                    return
                removal = _removal_outcome(writer)
            now = time.monotonic()
            if writer.transactions != transactions:
                transactions, until = (
                    writer.transactions,
                    min(now, began + _MAX_REMOVAL_SECONDS) + _REMOVAL_TIMEOUT_SECONDS,
                )
            if now >= until:
                # Read once: the writer's thread may succeed meanwhile.
                why = (writer.failing or (f"that takes longer than {now - began:.0f} seconds",))[0]
                raise StoreUnavailable(
                    "what was to be deleted is not found any more, but the durable store has not removed it yet "
                    f"({why}): it comes back if the daemon is killed now; that is tried until it succeeds, and "
                    "deleting it again tells whether it has"
                )

    async def expire(self) -> int:
        """Remove chunks whose TTL, set by requests or their tenant, has passed. Returns their number.

        After a reload of tenants' limits it first applies these to all chunks: their TTLs and their partitions.
        """
        dropped, yield_timer, now = 0, YieldTimer(), self.tiers.clock()
        if self._ttl.limits_changed():
            async for chunk in self._listing.iter_chunks(b""):
                if chunk.indexed:
                    self._ttl.schedule(chunk)
                    self.tiers.update_partitions(chunk)
        while (due := self._ttl.next_due(now)) is not None:
            if due.is_expired(now):
                dropped += await self._remove_subtree(due, LossCause.EXPIRED, yield_timer)
            await yield_timer.maybe_yield()
        return dropped

    async def _remove_subtree(self, chunk: Chunk, cause: LossCause, yield_timer: YieldTimer) -> int:
        """Remove a chunk and its descendants, leaves first. Returns their number."""
        branch = [chunk]
        for member in branch:
            branch.extend(self.tiers.index.children(member.key))
            await yield_timer.maybe_yield()
        dropped = 0
        while branch:
            member = branch.pop()
            if member.indexed:
                dropped += self.tiers.remove_subtree(member, cause)
            await yield_timer.maybe_yield()
        return dropped


def _removal_outcome(writer: GroupCommitWriter) -> asyncio.Future[PutOutcome]:
    """Return a future of the outcome of all removals queued so far."""
    removal: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()

    def hear(result: PutResult) -> None:
        if not removal.done():
            removal.set_result(result.outcome)

    writer.flush(hear)
    return removal
