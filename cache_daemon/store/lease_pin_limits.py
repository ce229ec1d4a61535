"""Limits on leased or pinned chunks per caller, with the current usage.

A caller is external if it does not use the private socket. Each external caller may use one share of a budget, and all
external callers together a larger share. So one caller can neither lease the whole arena nor use all pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from weakref import WeakValueDictionary

from cache_daemon.store.chunk import Chunk


class LeasePinLimit:
    """Distinct chunks that one caller leases or pins, with a limit on their bytes.

    ``whole`` is the limit of all external callers together, which includes this one.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[Chunk], int], whole: LeasePinLimit | None = None) -> None:
        self.max_bytes, self.size_bytes, self.whole = max_bytes, 0, whole
        self._size_of = size_of
        self._uses: Counter[Chunk] = Counter()

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._uses)

    def add(self, chunk: Chunk, times: int = 1) -> None:
        """Count ``times`` more uses of a chunk; a negative number ends uses."""
        if chunk not in self._uses:
            self._count(chunk, 1)
        self._uses[chunk] += times
        if not self._uses[chunk]:
            del self._uses[chunk]
            self._count(chunk, -1)

    def _count(self, chunk: Chunk, by: int) -> None:
        self.size_bytes += by * self._size_of(chunk)
        if self.whole is not None:
            self.whole.add(chunk, by)

    def num_fitting(self, chunks: Sequence[Chunk]) -> int:
        """Return the number of leading chunks that can be added within the limits."""
        free = self.free_bytes
        for n, chunk in enumerate(chunks):
            if chunk not in self._uses:
                free -= self._size_of(chunk)
                if free < 0:
                    return n
        return len(chunks)

    @property
    def free_bytes(self) -> int:
        """Bytes of chunks that can be added within the limits."""
        own = self.max_bytes - self.size_bytes
        return own if self.whole is None else min(own, self.whole.free_bytes)

    def check_integrity(self, uses: Counter[Chunk]) -> None:
        """Raise AssertionError unless the counted uses equal ``uses`` and their bytes add up."""
        assert self._uses == uses, "a caller's uses do not add up"
        assert self.size_bytes == sum(map(self._size_of, uses)), "a caller's bytes do not add up"


class LeasePinLimits:
    """Limits of all external callers, by caller; keeps no entry for a caller without uses."""

    def __init__(self, external_bytes: int, caller_bytes: int, size_of: Callable[[Chunk], int]) -> None:
        self._caller_bytes, self._size_of = caller_bytes, size_of
        self._whole = LeasePinLimit(external_bytes, size_of)
        self._of: WeakValueDictionary[Hashable, LeasePinLimit] = WeakValueDictionary()

    def of(self, caller: Hashable) -> LeasePinLimit:
        """Return the limit and usage of a caller."""
        found = self._of.get(caller)
        if found is None:
            found = self._of[caller] = LeasePinLimit(self._caller_bytes, self._size_of, self._whole)
        return found
