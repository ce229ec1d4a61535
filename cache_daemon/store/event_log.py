"""The event log of ``Watch``, from which readers can resume."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvsidecar.cache.v1.cache_pb2 import EventType, WatchResponse
from kvsidecar.errors import EventsLost, InvalidRequest

from cache_daemon.store.chunk import ChunkSnapshot

MAX_EVENTS = 10_000
_ALL = b""
# Maximal number of tenants whose last event number is kept, even after the log dropped their events.
_MAX_ROOTS = 100_000


@dataclass(frozen=True, slots=True)
class _Event:
    number: int  # number among all events
    of_root: int  # number among the events of its tenant
    kind: EventType.ValueType
    state: ChunkSnapshot


class EventLog:
    """Events with two numbers, each from 1 without gaps: over all tenants, and per tenant root.

    The log keeps the last ``MAX_EVENTS`` events.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._last_number: Counter[bytes] = Counter()  # by root; b"" counts all events
        self._events: dict[bytes, deque[_Event]] = {_ALL: deque()}
        self._changed = asyncio.Event()

    def append(self, kind: EventType.ValueType, state: ChunkSnapshot) -> None:
        """Add an event and wake the readers."""
        root, last = state.header.root, self._last_number
        last[_ALL] += 1
        last[root] += 1
        event = _Event(last[_ALL], last[root], kind, state)
        everything = self._events[_ALL]
        everything.append(event)
        self._events.setdefault(root, deque()).append(event)
        if len(everything) > MAX_EVENTS:
            root = everything.popleft().state.header.root
            of_root = self._events[root]
            of_root.popleft()
            if not of_root:
                del self._events[root]
        if len(self._last_number) > _MAX_ROOTS:
            self._last_number = Counter({r: n for r, n in self._last_number.items() if r in self._events})
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(
        self, epoch: int, after: int, root: bytes = _ALL, *, with_tokens: bool = False
    ) -> AsyncIterator[WatchResponse]:
        """Yield the events after a number, then new events as they arrive.

        Yields all events or, with ``root``, the events of that root; then ``after`` is a number of that root. Raises
        EventsLost when events after ``after`` were dropped. Raises InvalidRequest for a number that no event has had
        yet.
        """
        if epoch == 0:
            after = self._last_number[root]
        elif epoch != self._epoch:
            raise EventsLost(f"epoch {epoch} has ended (now {self._epoch}); read the state with List, then watch anew")
        if root != _ALL and root not in self._last_number and after:
            raise EventsLost(f"nothing is known of events up to {after}; read the state with List, then watch anew")
        if after > self._last_number[root]:
            raise InvalidRequest(
                f"after_sequence is {after}; the last event of this epoch is {self._last_number[root]}"
            )
        yield WatchResponse(epoch=self._epoch)
        while True:
            changed, due = self._changed, self._last_number[root] - after
            kept = self._events.get(root, ())
            # Negative: the tenant was forgotten meanwhile, and its numbers restarted at 1.
            if not 0 <= due <= len(kept):
                raise EventsLost(f"events after {after} are no longer kept; read the state with List, then watch anew")
            for event in [kept[i] for i in range(-due, 0)]:
                after = event.number if root == _ALL else event.of_root
                info = event.state.info(with_tokens=with_tokens)
                yield WatchResponse(epoch=self._epoch, sequence_number=after, type=event.kind, chunk=info)
            if after == self._last_number[root]:
                await changed.wait()
