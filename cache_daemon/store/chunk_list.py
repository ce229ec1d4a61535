"""Chunk list: pages, iteration and usage over many chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse

from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.yield_timer import YieldTimer

_PAGE_CHUNKS = 256


@dataclass(frozen=True)
class ChunkList:
    """Lists the chunks of one store's index, in steps that yield to the event loop."""

    index: PrefixIndex

    def page(self, root: bytes, after: bytes, limit: int) -> Sequence[Chunk]:
        """Return a page of chunks ordered by prefix hash.

        With an empty root, return chunks of all tenants, ordered by root and prefix hash. ``after`` is the root and
        prefix hash of the previous page's last chunk.
        """
        if root:
            return self.index.page_of_root(root, after[keys.HASH_BYTES :], limit)
        out: list[Chunk] = []
        for name in self.index.roots_from(after[: keys.HASH_BYTES]):
            begun = after[keys.HASH_BYTES :] if name == after[: keys.HASH_BYTES] else b""
            out += self.index.page_of_root(name, begun, limit - len(out))
            if len(out) >= limit:
                break
        return out

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
