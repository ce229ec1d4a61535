"""Applies the hints of requests to the chunks that they use and store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.chunk_groups import ChunkGroups
from cache_daemon.store.prompt_hints import ChunkHints, PromptHints
from cache_daemon.store.retained_chunks import RetainedChunks
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.ttl import TtlIndex


@dataclass(frozen=True)
class HintApplier:
    """Expiry, retention, groups and priorities of one store. Runs on the event loop."""

    tiers: TierManager
    ttl: TtlIndex
    retained: RetainedChunks
    groups: ChunkGroups

    def record_match(self, path: Sequence[Chunk], contents: Sequence[tuple[int, Chunk]], hints: PromptHints) -> None:
        """Apply a request's hints to its matched prefix and content matches.

        ``contents`` are pairs ``(start, chunk)``; ``start`` is the position in the request's prompt.
        """
        moved = [chunk for _, chunk in contents]
        if hints.retained:
            starts = (*(chunk.start_position for chunk in path), *(start for start, _ in contents))
            for start, chunk in zip(starts, (*path, *moved), strict=True):
                at = hints.at(start)
                self.ttl.extend(chunk, at.expires_at)
                self.retained.extend(chunk, at.retained_until)
        else:
            for chunk in (*path[-1:], *moved):
                self.ttl.extend(chunk, hints.expires_at)
        for chunk in (*path, *moved):
            self._share(chunk, hints.group, hints.low_priority)

    def record_use(self, chunk: Chunk, hints: ChunkHints) -> None:
        """Apply hints to one chunk."""
        self.ttl.extend(chunk, hints.expires_at)
        self.retained.extend(chunk, hints.retained_until)
        self._share(chunk, hints.group, hints.low_priority)

    def record_continuation(self, chunk: Chunk | None, hints: PromptHints, visited: set[Chunk]) -> None:
        """Apply a request's hints to a chunk of its prompt and to the chunk's ancestors.

        ``visited`` are the chunks that calls for the same request have visited; the call adds to them.
        """
        path: list[Chunk] = []
        while chunk is not None and chunk not in visited:
            visited.add(chunk)
            path.append(chunk)
            chunk = self.tiers.parent_of(chunk)
        self.record_match(path[::-1], (), hints)

    def leave_groups(self, chunk: Chunk | None) -> None:
        """Take a chunk and its ancestors out of their groups, because a caller without a group reads them."""
        while chunk is not None:
            if chunk.group:
                self.groups.leave(chunk)
            chunk = self.tiers.parent_of(chunk)

    def inherit(self, chunk: Chunk, old: Chunk) -> None:
        """Apply the hints of ``old`` to ``chunk``, the longer sibling that supersedes it."""
        self.record_use(chunk, ChunkHints(old.expires_at, old.retained_until, old.group, old.low_priority))

    def _share(self, chunk: Chunk, group: str, low_priority: bool) -> None:
        if chunk.group and chunk.group != group:
            self.groups.leave(chunk)
        if chunk.low_priority and not low_priority:
            self.tiers.raise_priority(chunk)
