"""Best-fit allocator of contiguous ranges, for the daemon's arena and the worker's KV pool."""

from __future__ import annotations

from sortedcontainers import SortedDict, SortedList


class RangeAllocator:
    """Free ranges of ``[0, capacity)`` in abstract units.

    Best fit; among equal ranges, the lowest offset. Freed neighbours are merged. Not thread-safe. Calls take O(log n).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self.capacity = capacity
        self.free_units = capacity
        self._by_size: SortedList[tuple[int, int]] = SortedList([(capacity, 0)])
        self._size_at: dict[int, int] = {0: capacity}  # free range: start -> length
        self._start_of_end: dict[int, int] = {capacity: 0}  # free range: end -> start
        self._used: SortedDict[int, int] = SortedDict()  # taken range: start -> length

    def allocate(self, units: int) -> int | None:
        """Allocate contiguous units; return their start, or None when no range is long enough."""
        if units < 1:
            raise ValueError(f"cannot allocate {units} units")
        i = self._by_size.bisect_left((units, -1))
        if i == len(self._by_size):
            return None
        length, start = self._by_size[i]
        self._remove(start, length)
        if length > units:
            self._insert(start + units, length - units)
        self._used[start] = units
        self.free_units -= units
        return int(start)

    def extend(self, end: int, units: int) -> bool:
        """Extend the used range that ends at ``end``, if the next ``units`` are free."""
        length = self._size_at.get(end, 0)
        if length < units:
            return False
        start, taken = self._used.peekitem(self._used.bisect_left(end) - 1)
        if start + taken != end:
            raise KeyError(f"no taken range ends at {end}")
        self._remove(end, length)
        if length > units:
            self._insert(end + units, length - units)
        self._used[start] += units
        self.free_units -= units
        return True

    def free(self, start: int) -> int:
        """Free the used range that begins at ``start``; return its length. Raises KeyError without such a range."""
        units = int(self._used.pop(start))
        self._release(start, units)
        return units

    def free_part(self, start: int, units: int) -> None:
        """Free a part of one used range. Raises KeyError unless one used range contains all of it."""
        at = self._used.bisect_right(start) - 1
        first, length = self._used.peekitem(at) if at >= 0 else (0, 0)
        if units < 1 or start + units > first + length:
            raise KeyError(f"{start}+{units} is not part of a taken range")
        before, after = start - first, first + length - start - units
        del self._used[first]
        if before:
            self._used[first] = before
        if after:
            self._used[start + units] = after
        self._release(start, units)

    def _release(self, start: int, length: int) -> None:
        self.free_units += length
        before = self._start_of_end.get(start)
        if before is not None:
            size = self._size_at[before]
            self._remove(before, size)
            start, length = before, length + size
        after = self._size_at.get(start + length)
        if after is not None:
            self._remove(start + length, after)
            length += after
        self._insert(start, length)

    @property
    def largest_free(self) -> int:
        """Length of the longest free range."""
        return int(self._by_size[-1][0]) if self._by_size else 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and used ranges tile the capacity exactly."""
        at = 0
        ranges = sorted([*self._size_at.items(), *self._used.items()])
        for start, length in ranges:
            assert start == at, f"range at {start} does not follow the one that ends at {at}"
            at = start + length
        assert at == self.capacity, f"ranges end at {at} of {self.capacity}"
        assert self.free_units == sum(self._size_at.values()), "free_units does not add up"

    def _insert(self, start: int, length: int) -> None:
        self._by_size.add((length, start))
        self._size_at[start] = length
        self._start_of_end[start + length] = start

    def _remove(self, start: int, length: int) -> None:
        self._by_size.remove((length, start))
        del self._size_at[start]
        del self._start_of_end[start + length]
