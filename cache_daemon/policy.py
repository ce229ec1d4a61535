"""Eviction policies: which chunk a full tier gives up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the chunks of one tier. Knows keys and weights only, never the chunks."""

    def touch(self, key: bytes, size_bytes: int, prefill_seconds: float) -> None:
        """Says that a chunk came into the tier or was used."""
        ...

    def forget(self, key: bytes) -> None:
        """Says that a chunk left the tier. Unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[bytes]:
        """Keys in the order in which they should go. The caller skips those that must stay, and changes nothing
        while it iterates."""
        ...


class LeastRecentlyUsed:
    """Gives up what was unused for longest."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, key: bytes, size_bytes: int, prefill_seconds: float) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def forget(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)
