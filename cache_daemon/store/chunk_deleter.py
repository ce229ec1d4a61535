"""Deletes chunks from this node and from the remote tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from kvsidecar.errors import LimitExceeded

from cache_daemon.store.bulk_ops import BulkOps
from cache_daemon.store.chunk import Chunk

if TYPE_CHECKING:
    from cache_daemon.remote.coordinator import RemoteCoordinator


class ChunkDeleter:
    """Deletions on behalf of callers. Runs on the event loop."""

    def __init__(self, bulk: BulkOps, find: Callable[[bytes, bytes], Chunk], remote: RemoteCoordinator | None) -> None:
        """Create a deleter; ``find`` returns a tenant's chunk or raises ChunkNotFound."""
        self._bulk, self._find, self._remote = bulk, find, remote

    async def delete(self, root: bytes, prefix_hash: bytes, owner: Hashable | None) -> int:
        """Delete as ``ChunkStore.delete`` says."""
        found = self._bulk.get(prefix_hash)
        if found is None:  # the chunk may be reserved
            self._bulk.invalidate(root, prefix_hash, float("inf"))
        async with self._bulk.await_disk_removal():
            if self._remote is None or (found is not None and found.root != root):
                return await self._bulk.delete(root, self._find(root, prefix_hash) if prefix_hash else None)
            there: asyncio.Future[int] | LimitExceeded
            try:  # from now on no fetch reads it
                there = self._remote.delete(root, prefix_hash, is_known=found is not None, owner=owner)
            except LimitExceeded as error:
                there = error
            here = await self._bulk.delete(root, found) if found is not None or not prefix_hash else 0
            if isinstance(there, LimitExceeded):
                raise LimitExceeded(f"{here} chunks were deleted on this node, none in the remote tier: {there}")
            deleted = max(here, await self._remote.await_deletion(there))
            if prefix_hash and not deleted:
                self._find(root, prefix_hash)
            return deleted
