"""The event log: what Watch streams, kept for a while so that a reader can resume."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvsidecar.cache.v1.cache_pb2 import EventType, WatchResponse
from kvsidecar.errors import EventsLost

from cache_daemon.chunk import Chunk

KEPT = 10_000


class EventLog:
    """Numbers events from 1 without gaps and keeps the last ``KEPT``."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._kept: deque[WatchResponse] = deque(maxlen=KEPT)
        self._last = 0
        self._changed = asyncio.Event()

    def append(self, kind: EventType.ValueType, chunk: Chunk) -> None:
        self._last += 1
        self._kept.append(WatchResponse(epoch=self._epoch, sequence_number=self._last, type=kind, chunk=chunk.info()))
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, epoch: int, after: int) -> AsyncIterator[WatchResponse]:
        """Events after a number, then new ones as they come. Raises EventsLost when they are no longer kept."""
        if epoch == 0:
            after = self._last
        elif epoch != self._epoch:
            raise EventsLost(f"epoch {epoch} has ended (now {self._epoch}); read the state with List, then watch anew")
        yield WatchResponse(epoch=self._epoch)
        while True:
            changed = self._changed
            first = self._kept[0].sequence_number if self._kept else self._last + 1
            if after + 1 < first:
                raise EventsLost(f"events after {after} are gone, the oldest kept is {first}; read the state with List")
            for event in list(self._kept)[after + 1 - first :]:
                after = event.sequence_number
                yield event
            if after == self._last:
                await changed.wait()
