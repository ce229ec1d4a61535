"""Policies that rank an entry when it is used, and give up the lowest: LRU, LFU, GDSF."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from cache_daemon.eviction.eviction_policy import Entry
from cache_daemon.eviction.prefill_cost import Worth


@dataclass(slots=True)
class _Held:
    rank: tuple[float, int]
    uses: int
    parked: bool = False


class Ranked(ABC):
    """Among equal ranks, what was unused for longest goes first."""

    def __init__(self) -> None:
        self._held: dict[Entry, _Held] = {}
        self._offered: SortedDict[tuple[float, int], Entry] = SortedDict()
        self._tick = 0

    @abstractmethod
    def rank(self, entry: Entry, uses: int) -> float:
        """The rank of an entry that is used for the ``uses``-th time since it came in. Must not fall in ``uses``."""

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
        if not held.parked:
            del self._offered[held.rank]
        held.uses += 1
        self._tick += 1
        held.rank = self.rank(entry, held.uses), self._tick
        if not held.parked:
            self._offered[held.rank] = entry

    def park(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.parked:
            raise KeyError(f"{entry!r} is parked already")
        del self._offered[held.rank]
        held.parked = True

    def unpark(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.parked:
            raise KeyError(f"{entry!r} is not parked")
        held.parked = False
        self._offered[held.rank] = entry

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        if not held.parked:
            del self._offered[held.rank]

    def victims(self) -> Iterator[Entry]:
        return iter(self._offered.values())

    def __len__(self) -> int:
        return len(self._held)


class LeastRecentlyUsed(Ranked):
    """Gives up what was unused for longest."""

    def rank(self, entry: Entry, uses: int) -> float:
        return 0.0


class LeastFrequentlyUsed(Ranked):
    """Gives up what was used least often since it came in."""

    def rank(self, entry: Entry, uses: int) -> float:
        return float(uses)


class GreedyDualSizeFrequency(Ranked):
    """Gives up what saves fewest seconds of prefill per byte, times uses; the rank of the last to go is added to what
    is used after it, so that the past fades (Cherkasova 1998; with equal seconds per byte, LFU with ageing)."""

    def __init__(self) -> None:
        super().__init__()
        self._worth = Worth()
        self._inflation = 0.0

    def rank(self, entry: Entry, uses: int) -> float:
        return self._inflation + uses * self._worth.bounded(self._worth.per_byte(entry), uses > 1)

    def remove(self, entry: Entry) -> None:
        if next(self.victims(), None) is entry:
            self._inflation = max(self._inflation, self._held[entry].rank[0])
        super().remove(entry)
