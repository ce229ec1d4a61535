"""S3-FIFO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from sortedcontainers import SortedDict

from cache_daemon.eviction.eviction_policy import Entry

_SMALL_SHARE = 0.1
_MOST_USES = 3
_USES_TO_STAY = 2


@dataclass(slots=True)
class _Held:
    place: int
    main: bool
    uses: int = 0
    parked: bool = False


class _Queue:
    """Entries in the order in which they were queued. Counts the bytes of parked ones, but does not show them."""

    def __init__(self) -> None:
        self.shown: SortedDict[int, Entry] = SortedDict()
        self.size_bytes = 0


class S3Fifo:
    """Two queues (Yang et al., SOSP 2023): newcomers pass a small one of a tenth of the bytes, and reach the main one
    if they are used twice there, or again soon after they left it. Main gives second chances, up to three."""

    def __init__(self) -> None:
        self._held: dict[Entry, _Held] = {}
        self._small, self._main = _Queue(), _Queue()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._place = 0

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        return True

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        if entry in self._held:
            raise KeyError(f"{entry!r} is in the tier already")
        main = entry.key in self._ghosts
        self._ghosts.pop(entry.key, None)
        held = self._held[entry] = _Held(0, main, min(uses, _MOST_USES))
        self._enqueue(entry, held)

    def touch(self, entry: Entry) -> None:
        held = self._held[entry]
        held.uses = min(held.uses + 1, _MOST_USES)

    def park(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.parked:
            raise KeyError(f"{entry!r} is parked already")
        del self._queue(held).shown[held.place]
        held.parked = True

    def unpark(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.parked:
            raise KeyError(f"{entry!r} is not parked")
        held.parked = False
        self._queue(held).shown[held.place] = entry

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        self._dequeue(entry, held)
        if not held.main:
            self._ghosts[entry.key] = None
            while len(self._ghosts) > max(1, (1 - _SMALL_SHARE) * len(self._held)):
                self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Entry]:
        # Second chances are given now; each was paid for by a use.
        small_bytes = _SMALL_SHARE * (self._small.size_bytes + self._main.size_bytes)
        while self._small.shown and (self._small.size_bytes > small_bytes or not self._main.shown):
            entry = self._small.shown.peekitem(0)[1]
            held = self._held[entry]
            if held.uses < _USES_TO_STAY:
                return chain(self._small.shown.values(), self._main.shown.values())
            self._move_to_main(entry, held, 0)
        while self._main.shown:
            entry = self._main.shown.peekitem(0)[1]
            held = self._held[entry]
            if not held.uses:
                break
            self._move_to_main(entry, held, held.uses - 1)
        return chain(self._main.shown.values(), self._small.shown.values())

    def __len__(self) -> int:
        return len(self._held)

    def _move_to_main(self, entry: Entry, held: _Held, uses: int) -> None:
        self._dequeue(entry, held)
        held.main, held.uses = True, uses
        self._enqueue(entry, held)

    def _enqueue(self, entry: Entry, held: _Held) -> None:
        self._place += 1
        held.place = self._place
        queue = self._queue(held)
        queue.shown[held.place] = entry
        queue.size_bytes += entry.size_bytes

    def _dequeue(self, entry: Entry, held: _Held) -> None:
        queue = self._queue(held)
        if not held.parked:
            del queue.shown[held.place]
        queue.size_bytes -= entry.size_bytes

    def _queue(self, held: _Held) -> _Queue:
        return self._main if held.main else self._small
