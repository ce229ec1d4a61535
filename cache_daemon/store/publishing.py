"""A chunk becomes visible: by a commit, or because a remote tier had it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_COMMITTED

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.tiers import Tiers


@dataclass(frozen=True)
class Publishing:
    """``persistence`` is None without a durable tier."""

    tiers: Tiers
    persistence: Persistence | None
    pins: Pins

    def publish(self, chunk: Chunk) -> None:
        """Lists a chunk whose slot holds its payload, and whose parent is listed and superseded by nothing. What it
        supersedes goes; it becomes durable where there is a durable tier."""
        tiers = self.tiers
        tiers.list_chunk(chunk)
        for old in tiers.index.superseded_by(chunk):
            self.pins.move(old, chunk)
            if self.persistence is not None:
                self.persistence.supersede(chunk, old)
            else:
                tiers.drop(old)
        tiers.tell(EVENT_TYPE_COMMITTED, chunk)
        if self.persistence is not None:
            self.persistence.persist(chunk)
