"""Content index: finds chunks with the same tokens after any prefix, for approximate reuse."""

from __future__ import annotations

from cache_daemon.store.chunk import Chunk, Residency

# Maximal number of copies of one text, after different prefixes, that are considered for reuse.
_MAX_COPIES = 16


class ContentIndex:
    """Indexed chunks by content hash, which includes the tenant root. Not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[bytes, dict[bytes, Chunk]] = {}  # content hash -> prefix hash -> chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def add(self, chunk: Chunk) -> None:
        self._chunks.setdefault(chunk.header.content_hash, {})[chunk.key] = chunk

    def remove(self, chunk: Chunk) -> None:
        same = self._chunks[chunk.header.content_hash]
        del same[chunk.key]
        if not same:
            del self._chunks[chunk.header.content_hash]

    def find(self, content_hash: bytes, tokens: bytes) -> Chunk | None:
        """Return a chunk with these tokens after any prefix.

        Prefers a chunk in the arena; among equals, the newest.
        """
        same = self._chunks.get(content_hash)
        if same is None:
            return None
        newest = [c for c, _ in zip(reversed(same.values()), range(_MAX_COPIES), strict=False) if c.ids == tokens]
        return next((c for c in newest if c.arena_state is Residency.PRESENT), newest[0] if newest else None)
