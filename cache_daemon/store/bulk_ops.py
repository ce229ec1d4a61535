"""Bulk operations: delete, expire, count and list many chunks.

They yield to the event loop, so chunks may be added and removed while they run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse
from kvsidecar.errors import ChunkNotFound, StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, PutResult
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.ttl import TtlIndex
from cache_daemon.store.yield_timer import YieldTimer

_PAGE_CHUNKS = 256
# Maximal time that a deletion waits for a disk that fails or hangs, and for one with many chunks to remove.
_REMOVAL_TIMEOUT_SECONDS, _MAX_REMOVAL_SECONDS = 5.0, 30.0


class BulkOps:
    """Bulk operations on one store's index."""

    def __init__(self, tiers: TierManager, ttl: TtlIndex, invalidate: Callable[[bytes, bytes, float], None]) -> None:
        """Create the operations; ``invalidate`` is called for every deletion.

        See ``TwoPhaseCommit.invalidate``.
        """
        self.tiers, self._terms, self.invalidate = tiers, ttl, invalidate

    async def delete(self, root: bytes, chunk: Chunk | None, before: float = inf) -> int:
        """Remove a chunk with its subtree, a tenant's chunks, or everything.

        ``chunk`` None removes a tenant; an empty ``root`` too removes everything. Removes only chunks that were
        inserted by ``before`` (monotonic), and their descendants. Invalidates earlier reservations. Returns the number
        of chunks removed.
        """
        self.invalidate(root, chunk.key if chunk is not None else b"", before)
        if chunk is not None:
            return await self._remove_subtree(chunk, LossCause.DELETED, YieldTimer())
        dropped, yield_timer = 0, YieldTimer()
        async for found in self.iter_chunks(root):
            if found.indexed and found.inserted_at <= before:
                dropped += await self._remove_subtree(found, LossCause.DELETED, yield_timer)
        return dropped

    @asynccontextmanager
    async def await_disk_removal(self) -> AsyncIterator[None]:
        """At the end of the block, wait until the disk has removed the chunks.

        Waits also if a chunk was not found, since it may have been deleted a moment ago. Raises StoreUnavailable when
        the disk does not complete the removal in time.
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
        """Remove chunks whose TTL, set by requests or their tenant, has passed.

        Returns their number.
        """
        dropped, yield_timer = 0, YieldTimer()
        for chunk in self._terms.expired():
            if chunk.indexed and chunk.is_expired(self.tiers.clock()):  # no request has extended its TTL meanwhile
                dropped += await self._remove_subtree(chunk, LossCause.EXPIRED, yield_timer)
        if not self.tiers.accounts.has_ttl:
            return dropped
        now = self.tiers.clock()
        async for chunk in self.iter_chunks(b""):
            if chunk.indexed and chunk.is_expired(now):
                dropped += await self._remove_subtree(chunk, LossCause.EXPIRED, yield_timer)
        return dropped

    async def count(self, root: bytes) -> StatsResponse:
        """Return usage of one tenant in a namespace."""
        out = StatsResponse()
        async for chunk in self.iter_chunks(root):
            resident, durable = chunk.arena_state is Residency.PRESENT, chunk.disk_state is Residency.PRESENT
            out.chunks += 1
            out.tokens += chunk.tokens
            out.arena_chunks += resident
            out.arena_used_bytes += chunk.size_bytes * resident
            out.durable_chunks += durable
            out.durable_bytes += chunk.stored_bytes * durable
            out.pinned_bytes += chunk.size_bytes * (chunk.pins > 0)
            out.retained_bytes += chunk.size_bytes * chunk.is_retained
        return out

    def page(self, root: bytes, after: bytes, limit: int) -> Sequence[Chunk]:
        """Return a page of chunks ordered by prefix hash.

        With an empty root, return chunks of all tenants, ordered by root and prefix hash. ``after`` is the root and
        prefix hash of the previous page's last chunk.
        """
        index = self.tiers.index
        if root:
            return index.page_of_root(root, after[keys.HASH_BYTES :], limit)
        out: list[Chunk] = []
        for name in index.roots_from(after[: keys.HASH_BYTES]):
            begun = after[keys.HASH_BYTES :] if name == after[: keys.HASH_BYTES] else b""
            out += index.page_of_root(name, begun, limit - len(out))
            if len(out) >= limit:
                break
        return out

    def iter_roots(self, first: bytes) -> Iterator[bytes]:
        """Yield roots that have chunks, in order.

        The caller must not yield to the event loop while it iterates.
        """
        return self.tiers.index.roots_from(first)

    def get(self, key: bytes) -> Chunk | None:
        """Return a chunk by its prefix hash."""
        return self.tiers.index.get(key)

    async def iter_chunks(self, root: bytes) -> AsyncIterator[Chunk]:
        """Yield a tenant's chunks, or with an empty root all chunks.

        Chunks that are added or removed meanwhile may be missing.
        """
        after, yield_timer = b"", YieldTimer()
        while page := self.page(root, after, _PAGE_CHUNKS):
            after = page[-1].root + page[-1].key
            for chunk in page:
                yield chunk
                await yield_timer.maybe_yield()

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
