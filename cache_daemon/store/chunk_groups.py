"""Chunk groups: chunks that only one named session of a client has used.

A chunk joins the group of the request that stores it. It leaves the group for good when a request of another group, or
without a group, uses it. So the release of a group removes no chunk that others have used. A group exists as long as it
has chunks, which bounds the number of groups. After a restart of the daemon no chunk has a group, so a release removes
nothing.
"""

from __future__ import annotations

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer


class ChunkGroups:
    """Groups of one store's chunks, by tenant root and name. Runs on the event loop."""

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._members: dict[tuple[bytes, str], dict[Chunk, None]] = {}
        tiers.on_indexed.append(self._on_indexed)
        tiers.on_unindexed.append(self._remove)

    def leave(self, chunk: Chunk) -> None:
        """Take a chunk out of its group, because a request outside the group uses it."""
        self._remove(chunk)
        chunk.group = ""

    async def release(self, root: bytes, group: str) -> int:
        """Remove a group's chunks, children first, from arena and disk. Returns their number.

        A chunk stays if it is pinned, or if a chunk outside the group continues it.
        """
        members = sorted(self._members.get((root, group), ()), key=lambda chunk: -chunk.end_position)
        removed, yield_timer = 0, YieldTimer()
        for chunk in members:
            if chunk.indexed and chunk.group == group and not chunk.pins and not self._tiers.index.children(chunk.key):
                removed += self._tiers.remove_subtree(chunk, LossCause.RELEASED)
            await yield_timer.maybe_yield()
        return removed

    def _on_indexed(self, chunk: Chunk) -> None:
        if chunk.group:
            self._members.setdefault((chunk.root, chunk.group), {})[chunk] = None

    def _remove(self, chunk: Chunk) -> None:
        members = self._members.get((chunk.root, chunk.group))
        if members is not None:
            members.pop(chunk, None)
            if not members:
                del self._members[chunk.root, chunk.group]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the groups have exactly the indexed chunks that name them."""
        expected: dict[tuple[bytes, str], set[bytes]] = {}
        for chunk in self._tiers.index:
            if chunk.group:
                expected.setdefault((chunk.root, chunk.group), set()).add(chunk.key)
        listed = {name: {chunk.key for chunk in chunks} for name, chunks in self._members.items()}
        assert listed == expected, "groups and chunks differ"
