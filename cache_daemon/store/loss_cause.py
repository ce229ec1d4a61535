"""Causes for which chunks leave the index, or never enter it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_DELETED, EVENT_TYPE_EVICTED, EventType

from cache_daemon.store.tenant_accounts import TenantAccount


class LossCause(enum.Enum):
    """Cause of a chunk's removal or refusal, with its event."""

    SUPERSEDED = enum.auto()  # a longer sibling has its tokens: nothing is lost
    DELETED = enum.auto()
    CORRUPT = enum.auto()
    EXPIRED = enum.auto()
    ARENA_FULL = enum.auto()
    DISK_FULL = enum.auto()
    INDEX_FULL = enum.auto()
    ARENA_QUOTA = enum.auto()
    DISK_QUOTA = enum.auto()
    ENTRY_QUOTA = enum.auto()
    RELEASED = enum.auto()  # the chunk's group was released

    @property
    def event(self) -> EventType.ValueType:
        """Type of the event of a removal."""
        return EVENT_TYPE_DELETED if self in _DELETIONS else EVENT_TYPE_EVICTED


_DELETIONS = frozenset({LossCause.SUPERSEDED, LossCause.DELETED, LossCause.CORRUPT})


@dataclass(frozen=True, slots=True)
class LostChunk:
    """A chunk that was removed, or that the store refused. ``ids`` is ``Chunk.ids``."""

    tenant: TenantAccount
    parent_key: bytes
    start_position: int
    ids: bytes
    cause: LossCause
