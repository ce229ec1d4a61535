"""Eviction policy: the interface between a tier and its policy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol


class Entry(Hashable, Protocol):
    """A chunk as a policy sees it. Compared by identity: a chunk that is stored again is another entry."""

    @property
    def key(self) -> bytes:
        """Hash of the chunk, uniform in its first eight bytes; the same for the same prefix."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes that eviction of the entry frees in the tier."""
        ...

    @property
    def tokens(self) -> int: ...

    @property
    def start_position(self) -> int:
        """Number of tokens before the chunk."""
        ...

    @property
    def prefill_seconds(self) -> float:
        """Time to compute the chunk; 0 is unknown."""
        ...


class EvictionPolicy(Protocol):
    """Orders the entries of one tier for eviction.

    Not thread-safe. Deterministic: it has no clock and no random numbers. Every call except ``victims`` costs amortized
    O(log n) in the number of entries. Invalid calls (inserting twice, touching a missing entry) raise KeyError.
    """

    def admit(self, entry: Entry, parent: Entry | None = None) -> bool:
        """Return True when a new entry is worth more than its victims.

        Call ``admit`` for a full tier only, before ``insert``. It refuses an entry with a missing parent; call it for
        such an entry all the same, since the policy remembers that it saw the entry.
        """
        ...

    def insert(self, entry: Entry, parent: Entry | None = None, uses: int = 0) -> None:
        """Add an entry; add parents before their children.

        ``parent`` is the chunk that the entry continues, None at the start of a prompt; ``insert`` leaves the parent
        evictable. ``uses`` is the number of earlier uses, where known.
        """
        ...

    def touch(self, entry: Entry) -> None:
        """Record a use of an entry, evictable or not."""
        ...

    def make_unevictable(self, entry: Entry) -> None:
        """Exclude an entry with children, or a pinned entry, from ``victims``.

        Raises KeyError if the entry is unevictable already.
        """
        ...

    def make_evictable(self, entry: Entry) -> None:
        """Return the entry to ``victims``, with its history."""
        ...

    def remove(self, entry: Entry) -> None:
        """Remove an entry that left the tier."""
        ...

    def victims(self) -> Iterator[Entry]:
        """Yield all evictable entries, each once, worst first.

        The caller must not change the policy while it iterates. The first entries cost O(log n) each, even if many are
        unevictable.
        """
        ...

    def __len__(self) -> int:
        """Return the number of entries, including unevictable entries."""
        ...
