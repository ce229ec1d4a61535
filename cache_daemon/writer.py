"""The one thread that writes to the durable tier, many chunks to a transaction."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable import DurableTier, WriteGroup

_GROUP_BYTES = 32 << 20
_GROUP_ITEMS = 256


@dataclass(frozen=True)
class _Put:
    header: ChunkHeader
    payload: Callable[[], memoryview]  # called on the writer's thread
    done: Callable[[bool], None]  # called on the loop

    @property
    def key(self) -> bytes:
        return self.header.prefix_hash


@dataclass(frozen=True)
class _Remove:
    key: bytes


class DurableWriter:
    """Queues writes in order; a removal queued after a write wins.

    ``put``'s payload must stay readable until ``done`` is called, on the event loop, with True when it is durable.
    """

    def __init__(self, tier: DurableTier, loop: asyncio.AbstractEventLoop) -> None:
        self._tier, self._loop = tier, loop
        self._queue: deque[_Put | _Remove] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="durable-writer", daemon=True)
        self._thread.start()

    def put(self, header: ChunkHeader, payload: Callable[[], memoryview], done: Callable[[bool], None]) -> None:
        self._add(_Put(header, payload, done))

    def remove(self, key: bytes) -> None:
        self._add(_Remove(key))

    @property
    def pending(self) -> int:
        """Chunks queued and not yet written."""
        with self._wake:
            return sum(isinstance(item, _Put) for item in self._queue) + self._busy

    def stop(self) -> None:
        """Writes what is queued, then ends the thread. Blocks."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _add(self, item: _Put | _Remove) -> None:
        with self._wake:
            self._queue.append(item)
            self._wake.notify()

    def _take(self) -> list[_Put | _Remove]:
        with self._wake:
            self._busy = False
            while not self._queue and not self._stopping:
                self._wake.wait()
            group: list[_Put | _Remove] = []
            size = 0
            while self._queue and len(group) < _GROUP_ITEMS and size < _GROUP_BYTES:
                item = self._queue.popleft()
                size += item.header.payload_bytes if isinstance(item, _Put) else 0
                group.append(item)
            self._busy = any(isinstance(i, _Put) for i in group)
            return group

    def _run(self) -> None:
        while group := self._take():
            removed = {item.key for item in group if isinstance(item, _Remove)}
            last = {item.key: item for item in group}  # of a write and a removal of one key, the later wins
            wanted = tuple((item.header, item.payload()) for item in last.values() if isinstance(item, _Put))
            written = True
            try:
                self._tier.apply(WriteGroup(tuple(removed), wanted))
            except OSError:
                written = self._remove_only(removed, wanted)
            for item in group:
                if isinstance(item, _Put):
                    self._report(item, written)

    def _remove_only(self, removed: set[bytes], wanted: tuple[tuple[ChunkHeader, memoryview], ...]) -> bool:
        """After a failed group: the removals alone, which make room. The writes count as failed."""
        try:
            self._tier.apply(WriteGroup(tuple(removed | {h.prefix_hash for h, _ in wanted}), ()))
        except OSError:
            return False
        return not wanted

    def _report(self, item: _Put, written: bool) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(item.done, written)
