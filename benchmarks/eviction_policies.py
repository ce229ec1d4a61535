"""Eviction policies that the benchmark compares with the daemon's: LFU, S3-FIFO and GDSF.

The daemon offers only ``gittins`` and ``lru``. On every measured trace, the token hit ratio of each other policy
exceeds the ratio of ``gittins`` by at most 0.001 (docs/eviction.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from sortedcontainers import SortedDict

from cache_daemon import eviction
from cache_daemon.eviction import Entry, EvictionPolicy
from cache_daemon.eviction.prefill_cost import PrefillCost

_SMALL_SHARE = 0.1
_MAX_USES = 3
_USES_TO_STAY = 2


@dataclass(slots=True)
class _Held:
    rank: tuple[float, int]
    uses: int
    unevictable: bool = False


class Ranked(ABC):
    """Base of policies that evict the entry of the lowest rank; among equal ranks, the least recently used one."""

    def __init__(self) -> None:
        self._held: dict[Entry, _Held] = {}
        self._offered: SortedDict[tuple[float, int], Entry] = SortedDict()
        self._tick = 0

    @abstractmethod
    def rank(self, entry: Entry, uses: int) -> float:
        """Return the rank of an entry after ``uses`` uses since its insertion. More uses must not lower the rank."""

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        return True

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        if entry in self._held:
            raise KeyError(f"{entry!r} is in the tier already")
        self._tick += 1
        held = self._held[entry] = _Held((self.rank(entry, 1 + uses), self._tick), 1 + uses)
        self._offered[held.rank] = entry

    def touch(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.unevictable:
            del self._offered[held.rank]
        held.uses += 1
        self._tick += 1
        held.rank = self.rank(entry, held.uses), self._tick
        if not held.unevictable:
            self._offered[held.rank] = entry

    def make_unevictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.unevictable:
            raise KeyError(f"{entry!r} is unevictable already")
        del self._offered[held.rank]
        held.unevictable = True

    def make_evictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.unevictable:
            raise KeyError(f"{entry!r} is not unevictable")
        held.unevictable = False
        self._offered[held.rank] = entry

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        if not held.unevictable:
            del self._offered[held.rank]

    def victims(self) -> Iterator[Entry]:
        return iter(self._offered.values())

    def __len__(self) -> int:
        return len(self._held)


class LeastFrequentlyUsed(Ranked):
    """Evicts the entry with the fewest uses since its insertion."""

    def rank(self, entry: Entry, uses: int) -> float:
        return float(uses)


class GreedyDualSizeFrequency(Ranked):
    """Evicts by uses times saved seconds of prefill per byte (GDSF, Cherkasova 1998).

    New ranks include the rank of the last victim, so old entries age. If all entries save equal seconds per byte, this
    is LFU with ageing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worth = PrefillCost()
        self._inflation = 0.0

    def rank(self, entry: Entry, uses: int) -> float:
        return self._inflation + uses * self._worth.clamp(self._worth.cost_per_byte(entry), uses > 1)

    def remove(self, entry: Entry) -> None:
        if next(self.victims(), None) is entry:
            self._inflation = max(self._inflation, self._held[entry].rank[0])
        super().remove(entry)


@dataclass(slots=True)
class _Queued:
    place: int
    main: bool
    uses: int = 0
    unevictable: bool = False


class _Queue:
    """FIFO queue of entries. It counts the bytes of unevictable entries, but does not offer these as victims."""

    def __init__(self) -> None:
        self.shown: SortedDict[int, Entry] = SortedDict()
        self.size_bytes = 0


class S3Fifo:
    """Two FIFO queues (Yang et al., SOSP 2023).

    A new entry enters the small queue, which has a tenth of the bytes. It reaches the main queue if it is used twice in
    the small queue, or used again soon after its eviction. The main queue gives an entry up to three second chances.
    """

    def __init__(self) -> None:
        self._held: dict[Entry, _Queued] = {}
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
        held = self._held[entry] = _Queued(0, main, min(uses, _MAX_USES))
        self._enqueue(entry, held)

    def touch(self, entry: Entry) -> None:
        held = self._held[entry]
        held.uses = min(held.uses + 1, _MAX_USES)

    def make_unevictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.unevictable:
            raise KeyError(f"{entry!r} is unevictable already")
        del self._queue(held).shown[held.place]
        held.unevictable = True

    def make_evictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.unevictable:
            raise KeyError(f"{entry!r} is not unevictable")
        held.unevictable = False
        self._queue(held).shown[held.place] = entry

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        self._dequeue(entry, held)
        if not held.main:
            self._ghosts[entry.key] = None
            while len(self._ghosts) > max(1, (1 - _SMALL_SHARE) * len(self._held)):
                self._ghosts.popitem(last=False)

    def victims(self) -> Iterator[Entry]:
        # Each use since the last visit grants a second chance.
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

    def _move_to_main(self, entry: Entry, held: _Queued, uses: int) -> None:
        self._dequeue(entry, held)
        held.main, held.uses = True, uses
        self._enqueue(entry, held)

    def _enqueue(self, entry: Entry, held: _Queued) -> None:
        self._place += 1
        held.place = self._place
        queue = self._queue(held)
        queue.shown[held.place] = entry
        queue.size_bytes += entry.size_bytes

    def _dequeue(self, entry: Entry, held: _Queued) -> None:
        queue = self._queue(held)
        if not held.unevictable:
            del queue.shown[held.place]
        queue.size_bytes -= entry.size_bytes

    def _queue(self, held: _Queued) -> _Queue:
        return self._main if held.main else self._small


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "lru": eviction.LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "s3fifo": S3Fifo,
        "gdsf": GreedyDualSizeFrequency,
        "gittins": eviction.Gittins,
    }
)
"""The daemon's policies and those of this module, in the order of the published rows."""
