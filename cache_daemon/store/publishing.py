"""A chunk becomes visible: by a commit, or because a remote tier had it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_COMMITTED

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.sessions import Hold
from cache_daemon.store.tenants import Tenant
from cache_daemon.store.terms import Terms
from cache_daemon.store.tiers import Tiers


@dataclass(frozen=True)
class Publishing:
    """``persistence`` is None without a durable tier."""

    tiers: Tiers
    persistence: Persistence | None
    pins: Pins
    terms: Terms

    def continues(self, root: bytes, parent_key: bytes, start: int) -> bool:
        """Whether what a chunk that begins at ``start`` continues is here, and will stay: it may have been evicted
        meanwhile, or superseded."""
        if parent_key == root:
            return start == 0
        parent = self.tiers.index.get(parent_key)
        return parent is not None and parent.root == root and parent.end_position == start and not parent.superseded

    def entry_room(self, parent_key: bytes, tenant: Tenant) -> bool:
        """Whether the tenant may have one chunk more; its own others go, but not those that this one continues."""
        parent = self.tiers.index.get(parent_key)
        with_parent = Hold([] if parent is None else [parent], self.tiers.unused)
        try:
            return self.tiers.make_entry_room(tenant)
        finally:
            with_parent.give_back()

    def publish(self, chunk: Chunk, awaited: bool = False) -> None:
        """Lists a chunk whose slot holds its payload, and whose parent is listed and superseded by nothing. What it
        supersedes goes; it becomes durable where there is a durable tier, in a moment if a request waits for more
        (``awaited``)."""
        tiers = self.tiers
        tiers.list_chunk(chunk)
        for old in tiers.index.superseded_by(chunk):
            self.pins.move(old, chunk)
            self.terms.keep(chunk, old.kept_until)
            if self.persistence is not None:
                self.persistence.supersede(chunk, old)
            else:
                tiers.drop(old)
        tiers.tell(EVENT_TYPE_COMMITTED, chunk)
        if self.persistence is not None:
            (self.persistence.persist_later if awaited else self.persistence.persist)(chunk)
