"""Watchers of a tenant whose events were dropped get an error."""

from __future__ import annotations

import asyncio

import pytest
from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_COMMITTED
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import EventsLost

from cache_daemon.store import event_log
from cache_daemon.store.chunk import ChunkSnapshot
from cache_daemon.store.event_log import EventLog


def of_root(root: bytes) -> ChunkSnapshot:
    return ChunkSnapshot(ChunkHeader(root=root), b"", True, False, False, 0, 0, 0, 0.0, 0.0)


async def test_a_watcher_of_a_tenant_that_was_forgotten_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for nothing and never gave way, so that everything stood still."""
    monkeypatch.setattr(event_log, "MAX_EVENTS", 2)
    monkeypatch.setattr(event_log, "_MAX_ROOTS", 3)
    log = EventLog(7)
    log.append(EVENT_TYPE_COMMITTED, of_root(b"a"))
    follower = log.follow(0, 0, b"a")
    await anext(follower)
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    for n in range(8):
        log.append(EVENT_TYPE_COMMITTED, of_root(b"%d" % n))
    with pytest.raises(EventsLost):
        await asyncio.wait_for(waiting, 5)
