"""What a tier and its policy say to each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol


class Entry(Hashable, Protocol):
    """What a policy may know of a chunk. Equal only to itself: a chunk and its successor of the same key are two."""

    @property
    def key(self) -> bytes:
        """The chunk's hash, uniform in its first eight bytes; the same whenever the same prefix comes again."""
        ...

    @property
    def size_bytes(self) -> int:
        """What the tier gains when the entry goes."""
        ...

    @property
    def tokens(self) -> int: ...

    @property
    def start_position(self) -> int:
        """Tokens before the chunk."""
        ...

    @property
    def prefill_seconds(self) -> float:
        """What it took to compute; 0 is unknown."""
        ...


class EvictionPolicy(Protocol):
    """Orders the entries of one tier by what they are worth. Not thread-safe, knows no clock and draws no numbers:
    the same calls give the same answers.

    Every call but ``victims`` costs O(log n) amortized at most, in entries held. Calls that do not fit (inserting
    twice, touching what is not in) raise KeyError.
    """

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        """Whether an entry that is not in is worth more than what would go for it. To be asked of a full tier only,
        before ``insert``. An entry whose parent is not in is refused, and should be asked about nevertheless: that it
        was seen is remembered."""
        ...

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        """The entry came in; parents come before their children. ``parent`` is what it continues, None at the start
        of a prompt; it is not parked by this. ``uses``: how often the entry was used before, where that is known."""
        ...

    def touch(self, entry: Entry) -> None:
        """The entry was used. Parked ones are touched as well."""
        ...

    def make_unevictable(self, entry: Entry) -> None:
        """Excludes an entry with children, or a pinned one, from ``victims``. Once only, until ``make_evictable``."""
        ...

    def make_evictable(self, entry: Entry) -> None:
        """The entry may be offered again, with its history and the place that this gives it."""
        ...

    def remove(self, entry: Entry) -> None:
        """The entry left the tier, parked or not."""
        ...

    def victims(self) -> Iterator[Entry]:
        """All entries that are not parked, each once, worst first. Nothing may change while it is read; the first
        ones cost O(log n) each, whatever is parked."""
        ...

    def __len__(self) -> int:
        """Entries in the tier, parked ones too."""
        ...
