"""LRU policy: the baseline for comparisons with the default policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from cache_daemon.eviction.eviction_policy import Entry


@dataclass(slots=True)
class _Held:
    used_at: int
    unevictable: bool = False


class LeastRecentlyUsed:
    """Evicts the least recently used entry. Time is counted in calls."""

    def __init__(self) -> None:
        self._held: dict[Entry, _Held] = {}
        self._ranking: SortedDict[int, Entry] = SortedDict()  # by last use
        self._tick = 0

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        return True

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        if entry in self._held:
            raise KeyError(f"{entry!r} is in the tier already")
        self._tick += 1
        self._held[entry] = _Held(self._tick)
        self._ranking[self._tick] = entry

    def touch(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.unevictable:
            del self._ranking[held.used_at]
        self._tick += 1
        held.used_at = self._tick
        if not held.unevictable:
            self._ranking[held.used_at] = entry

    def make_unevictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if held.unevictable:
            raise KeyError(f"{entry!r} is unevictable already")
        del self._ranking[held.used_at]
        held.unevictable = True

    def make_evictable(self, entry: Entry) -> None:
        held = self._held[entry]
        if not held.unevictable:
            raise KeyError(f"{entry!r} is not unevictable")
        held.unevictable = False
        self._ranking[held.used_at] = entry

    def remove(self, entry: Entry) -> None:
        held = self._held.pop(entry)
        if not held.unevictable:
            del self._ranking[held.used_at]

    def victims(self) -> Iterator[Entry]:
        return iter(self._ranking.values())

    def __len__(self) -> int:
        return len(self._held)
