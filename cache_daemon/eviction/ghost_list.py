"""Ghost list: keys of evicted entries, in 8 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_WAYS = 4
_TAG_BITS, _NOTE_BITS = 16, 10
_TICK_SHIFT = _TAG_BITS + _NOTE_BITS
_TAGS, _NOTES = (1 << _TAG_BITS) - 1, (1 << _NOTE_BITS) - 1
MAX_NOTE = _NOTES


class GhostList:
    """Evicted keys with the tick of their last use and a note.

    Ticks are from 1 to below 2^38, notes up to ``MAX_NOTE``. A bucket holds four keys; a full bucket drops its oldest
    key. One lookup in 16,000 finds the entry of another key; the statistics tolerate that.
    """

    def __init__(self, entries: int) -> None:
        """Create a list with between ``entries`` and twice ``entries`` slots."""
        self.entries = entries
        self._buckets = 1 << max(0, (entries - 1).bit_length() - 2)
        self._slots = array("Q", bytes(8 * _WAYS * self._buckets))

    def put(self, key: bytes, tick: int, note: int) -> tuple[int, int] | None:
        """Add a key, again if it is present. Returns ``(tick, note)`` of a key that it displaced, or None."""
        start, tag = self._place(key)
        bucket = self._slots[start : start + _WAYS]
        at = bucket.index(min(bucket))
        self._slots[start + at] = tick << _TICK_SHIFT | note << _TAG_BITS | tag
        return _unpack(bucket[at]) if bucket[at] else None

    def take(self, key: bytes) -> tuple[int, int] | None:
        """Remove a key. Returns its ``(tick, note)``, or None."""
        start, tag = self._place(key)
        for at in range(start, start + _WAYS):
            value = self._slots[at]
            if value and value & _TAGS == tag:
                self._slots[at] = 0
                return _unpack(value)
        return None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the ``(tick, note)`` of all keys."""
        return (_unpack(value) for value in self._slots if value)

    def _place(self, key: bytes) -> tuple[int, int]:
        number = int.from_bytes(key[:8], "little")
        return (number >> _TAG_BITS) % self._buckets * _WAYS, number & _TAGS


def _unpack(value: int) -> tuple[int, int]:
    return value >> _TICK_SHIFT, value >> _TAG_BITS & _NOTES
