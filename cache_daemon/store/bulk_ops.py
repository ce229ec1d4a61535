"""Walks over many chunks: deleting, expiring, counting. They take turns with everything else on the event loop, so what
they walk over may change under them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_DELETED, EVENT_TYPE_EVICTED, EventType, StatsResponse
from kvsidecar.errors import ChunkNotFound, StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, PutResult
from cache_daemon.durable.group_commit_writer import DurableWriter
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.tier_manager import Tiers
from cache_daemon.store.ttl import Terms
from cache_daemon.store.yield_timer import Turns

_PAGE = 256
# So long a deletion waits for a disk that fails or hangs, and for one that has much to remove.
_WRITTEN_SECONDS, _MOST_SECONDS = 5.0, 30.0


class Walks:
    """Over a store's index."""

    def __init__(self, tiers: Tiers, terms: Terms, void: Callable[[bytes, bytes, float], None]) -> None:
        """``void`` hears of every deletion, as ``Writing.void``."""
        self.tiers, self._terms, self.void = tiers, terms, void

    async def delete(self, root: bytes, chunk: Chunk | None, made_by: float = inf) -> int:
        """Removes a chunk with all that continues it, without one a tenant's chunks, with no root everything: those
        that were listed by a time (monotonic), and what continues them. What was reserved before does not come any
        more. Returns how many."""
        self.void(root, chunk.key if chunk is not None else b"", made_by)
        if chunk is not None:
            return await self._drop_branch(chunk, EVENT_TYPE_DELETED, Turns())
        dropped, turns = 0, Turns()
        async for found in self.all_of(root):
            if found.listed and found.made_at <= made_by:
                dropped += await self._drop_branch(found, EVENT_TYPE_DELETED, turns)
        return dropped

    @asynccontextmanager
    async def on_disk(self) -> AsyncIterator[None]:
        """Ends when what was deleted is gone from the disk, too; also where it was not found, as it may have been
        deleted a moment ago. Raises StoreUnavailable when the disk does not take it in time."""
        try:
            yield
        except ChunkNotFound:
            await self._written()
            raise
        await self._written()

    async def _written(self) -> None:
        writer, began = self.tiers.writer, time.monotonic()
        if writer is None:
            return
        heard, until, transactions = _asked(writer), began + _WRITTEN_SECONDS, writer.transactions
        while True:
            await asyncio.wait({heard}, timeout=max(0.0, until - time.monotonic()))
            if heard.done():
                if heard.result() is PutOutcome.STORED:
                    return
                heard = _asked(writer)
            now = time.monotonic()
            if writer.transactions != transactions:
                transactions, until = writer.transactions, min(now, began + _MOST_SECONDS) + _WRITTEN_SECONDS
            if now >= until:
                # Asked once: the writer's thread may succeed meanwhile.
                why = (writer.failing or (f"that takes longer than {now - began:.0f} seconds",))[0]
                raise StoreUnavailable(
                    "what was to be deleted is not found any more, but the durable store has not removed it yet "
                    f"({why}): it comes back if the daemon is killed now; that is tried until it succeeds, and "
                    "deleting it again tells whether it has"
                )

    async def expire(self) -> int:
        """Drops what has passed the time that requests asked for, or its tenant's. Returns how many."""
        dropped, turns = 0, Turns()
        for chunk in self._terms.past():
            if chunk.listed and chunk.expired(self.tiers.clock()):  # not asked for meanwhile
                dropped += await self._drop_branch(chunk, EVENT_TYPE_EVICTED, turns)
        if not self.tiers.accounts.any_ttl:
            return dropped
        now = self.tiers.clock()
        async for chunk in self.all_of(b""):
            if chunk.listed and chunk.expired(now):
                dropped += await self._drop_branch(chunk, EVENT_TYPE_EVICTED, turns)
        return dropped

    async def count(self, root: bytes) -> StatsResponse:
        """What a tenant has in a namespace."""
        out = StatsResponse()
        async for chunk in self.all_of(root):
            resident, durable = chunk.in_arena is Residency.PRESENT, chunk.on_disk is Residency.PRESENT
            out.chunks += 1
            out.tokens += chunk.tokens
            out.arena_chunks += resident
            out.arena_used_bytes += chunk.size_bytes * resident
            out.durable_chunks += durable
            out.durable_bytes += chunk.stored_bytes * durable
            out.pinned_bytes += chunk.size_bytes * (chunk.pins > 0)
        return out

    def page(self, root: bytes, after: bytes, limit: int) -> Sequence[Chunk]:
        """Chunks of a tenant ordered by prefix hash, or with an empty root of all, ordered by root and prefix hash;
        ``after`` is the last one's root and prefix hash."""
        index = self.tiers.index
        if root:
            return index.of_root(root, after[keys.HASH_BYTES :], limit)
        out: list[Chunk] = []
        for name in index.roots_from(after[: keys.HASH_BYTES]):
            begun = after[keys.HASH_BYTES :] if name == after[: keys.HASH_BYTES] else b""
            out += index.of_root(name, begun, limit - len(out))
            if len(out) >= limit:
                break
        return out

    def roots_from(self, first: bytes) -> Iterator[bytes]:
        """Of tenants that have something here, in order; not while others have their turn."""
        return self.tiers.index.roots_from(first)

    def find(self, key: bytes) -> Chunk | None:
        """A chunk by its prefix hash."""
        return self.tiers.index.get(key)

    async def all_of(self, root: bytes) -> AsyncIterator[Chunk]:
        """A tenant's chunks, with no root all; those that come or go meanwhile may be among them or not."""
        after, turns = b"", Turns()
        while page := self.page(root, after, _PAGE):
            after = page[-1].root + page[-1].key
            for chunk in page:
                yield chunk
                await turns.give_way()

    async def _drop_branch(self, chunk: Chunk, why: EventType.ValueType, turns: Turns) -> int:
        """Drops a chunk and all that continues it, leaves first. Returns how many."""
        branch = [chunk]
        for member in branch:
            branch.extend(self.tiers.index.children(member.key))
            await turns.give_way()
        dropped = 0
        while branch:
            member = branch.pop()
            if member.listed:
                dropped += self.tiers.drop(member, why)
            await turns.give_way()
        return dropped


def _asked(writer: DurableWriter) -> asyncio.Future[PutOutcome]:
    """What comes of all that is to be removed now."""
    heard: asyncio.Future[PutOutcome] = asyncio.get_running_loop().create_future()

    def hear(result: PutResult) -> None:
        if not heard.done():
            heard.set_result(result.outcome)

    writer.written(hear)
    return heard
