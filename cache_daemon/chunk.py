"""One stored chunk, as the index knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvsidecar.cache.v1.cache_pb2 import ChunkInfo
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.arena import Slot


@dataclass(eq=False, slots=True)
class Chunk:
    """A committed chunk. Lives in the arena (``slot``), in the durable tier (``durable``), or both.

    ``leases`` readers and, while ``writing``, the writer thread use the slot; it is freed only when both are
    gone. ``doomed`` chunks are no longer in the index and vanish with their last user.
    """

    header: ChunkHeader
    slot: Slot | None = None
    durable: bool = False
    writing: bool = False
    doomed: bool = False
    leases: int = 0
    pins: int = 0
    hits: int = 0
    loading: asyncio.Future[bool] | None = field(default=None, repr=False)

    @property
    def key(self) -> bytes:
        return self.header.prefix_hash

    @property
    def size_bytes(self) -> int:
        return self.header.payload_bytes

    @property
    def in_use(self) -> bool:
        """Somebody reads or writes the slot."""
        return self.leases > 0 or self.writing or self.loading is not None

    def info(self) -> ChunkInfo:
        h = self.header
        return ChunkInfo(
            root=h.root,
            prefix_hash=h.prefix_hash,
            parent_prefix_hash=h.parent_prefix_hash,
            start_position=h.start_position,
            tokens=len(h.token_ids),
            bits=h.bits,
            payload_bytes=h.payload_bytes,
            resident=self.slot is not None,
            durable=self.durable,
            pinned=self.pins > 0,
            leases=self.leases,
            hits=self.hits,
        )
