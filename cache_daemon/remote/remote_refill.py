"""Refill of a remote tier that lost its data, such as a Valkey that restarted empty.

First, nodes have time to write lost deletions back. Then this node enqueues the chunks in its arena that its write mode
selects, parents before children. Chunks that are only on disk follow at their next use, or with ``cache push``: a
refill must not evict chunks that prompts use.
"""

from __future__ import annotations

import asyncio
import time
from math import inf

import structlog

from cache_daemon.remote import deletion_epochs
from cache_daemon.remote.deletion_epochs import EpochChange
from cache_daemon.remote.write_behind import MAX_QUEUED_CHUNKS, WriteBehindQueue
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.chunk_list import ChunkList

# Maximal length of the queue while a refill adds chunks to it, so that the queue has space for new chunks.
_MAX_PENDING_CHUNKS = MAX_QUEUED_CHUNKS // 4
_LOOK_SECONDS = 0.25

log = structlog.get_logger("cache_daemon")


class RemoteRefill:
    """Enqueues tenants' chunks again after the backend lost its data. Runs on the event loop."""

    def __init__(self, listing: ChunkList, write_behind: WriteBehindQueue) -> None:
        self._listing, self._write_behind = listing, write_behind
        self._due: dict[bytes, float] = {}  # tenant root -> time when its refill begins (monotonic)
        self._last_loss_at = -inf
        self._wake = asyncio.Event()
        self.num_losses = 0  # number of times that the backend lost data; losses within one grace period count once

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose chunks are to be written again."""
        return len(self._due)

    def on_epoch_change(self, root: bytes, change: EpochChange) -> None:
        """Schedule the refill of a tenant whose epoch the backend has lost."""
        if not root or change not in (EpochChange.EPOCH_LOST, EpochChange.DELETION_LOST):
            return
        now = time.monotonic()
        if now - self._last_loss_at > deletion_epochs.GRACE_SECONDS:
            self.num_losses += 1
            log.warning(
                "the remote tier has lost its data; chunks in memory are written to it again",
                in_seconds=round(deletion_epochs.GRACE_SECONDS),
            )
        self._last_loss_at = now
        if self._write_behind.is_writing:
            self._due[root] = now + deletion_epochs.GRACE_SECONDS
            self._wake.set()

    async def run(self) -> None:
        """Refill until cancelled."""
        while True:
            if not self._due:
                self._wake.clear()
                await self._wake.wait()
            root, begins_at = next(iter(self._due.items()))
            # Chunks inserted up to the loss are withheld until the grace period has passed.
            await asyncio.sleep(max(0.0, begins_at - time.monotonic()) + _LOOK_SECONDS)
            try:
                num_chunks = await self._refill(root)
                log.info("wrote chunks again to a remote tier that had lost them", chunks=num_chunks)
            except Exception:
                log.exception("refilling the remote tier failed, going on")
            if self._due.get(root) == begins_at:
                del self._due[root]

    async def _refill(self, root: bytes) -> int:
        """Enqueue the chunks of a tenant. Returns their number."""
        found: list[Chunk] = []
        async for chunk in self._listing.iter_chunks(root):
            if chunk.arena_state is Residency.PRESENT:
                found.append(chunk)
        num_chunks = 0
        for chunk in sorted(found, key=lambda one: one.start_position):
            while self._write_behind.pending >= _MAX_PENDING_CHUNKS:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
            num_chunks += chunk.indexed and self._write_behind.enqueue_again(chunk)
        return num_chunks
