"""Finds what lies in pages that are neither reachable nor free: leaves and payloads below a page that is damaged.

A leaf's records say by their checksums what they are. A payload is known by its header's record: its length and the
checksum of its stored bytes. Pages that were freed are left out, so that nothing comes back that was deleted; where
the list of free pages is damaged, nothing is searched.
"""

from __future__ import annotations

from typing import Protocol

from kvsidecar import keys

from cache_daemon.durable.durable_tier import PAGE_BYTES
from cache_daemon.durable.lmdb_file import LmdbCorruption, Node, PageFile, overflow_pages, readable_leaf_nodes
from cache_daemon.durable.page_walk import PageWalk
from cache_daemon.durable.record_format import (
    HEADERS,
    MINIMUM_VALUE_BYTES,
    NOTES,
    RECENCY,
    CorruptRecord,
    Record,
    verified,
)


class Finds(Protocol):
    """Where finds go."""

    file: PageFile
    records: dict[bytes, Record]
    places: dict[bytes, tuple[int, int]]
    notes: dict[bytes, bytes]
    ticks: dict[bytes, int]


class Taker(Protocol):
    """Checks a node and adds it to the finds."""

    walk: PageWalk

    def take(self, database: bytes, node: Node) -> None: ...

    def value(self, node: Node) -> bytes: ...


class LostPageSearch:
    """One search, after a lenient walk."""

    def __init__(self, finds: Finds, taker: Taker) -> None:
        self._finds, self._taker, self._file = finds, taker, finds.file
        self._used = taker.walk.used

    def search(self) -> None:
        """Raises OSError."""
        walk = self._taker.walk
        try:
            free = PageWalk(walk.file, walk.meta).free_pages()
        except LmdbCorruption:
            return
        values: list[int] = []
        number = 2
        while number < len(self._used):
            step = 1
            if not self._used[number] and not free[number]:
                try:
                    step = self._search(number, values)
                except LmdbCorruption:  # the file ends here
                    break
            number += step
        self._match(values)

    def _search(self, number: int, values: list[int]) -> int:
        """Looks at one page; returns how many belong together. Raises Damage, OSError."""
        pages = overflow_pages(self._file, number)
        if pages:
            values.append(number)
            return min(pages, len(self._used))
        for node in readable_leaf_nodes(self._file.page(number), number):
            self._take(node)
        return 1

    def _take(self, node: Node) -> None:
        """Takes a node of an unknown database for what its checksum says it is. Large ones are found by ``_match``."""
        finds = self._finds
        if node.value is None and node.size_bytes > len(self._used) * PAGE_BYTES:
            return
        for database, known in ((HEADERS, finds.records), (RECENCY, finds.ticks), (NOTES, finds.notes)):
            try:
                verified(database, node.key, self._taker.value(node))
            except (CorruptRecord, LmdbCorruption):
                continue
            if node.key not in known:
                self._taker.take(database, node)
            return

    def _match(self, values: list[int]) -> None:
        """Finds the payloads of records that have none, or one of another length, among values without a key."""
        finds = self._finds
        wanted: dict[tuple[int, int], bytes] = {}
        for key, record in finds.records.items():
            size = max(record.stored_length, MINIMUM_VALUE_BYTES)
            if finds.places.get(key, (0, 0))[1] != size:
                wanted[record.stored_length, record.stored_checksum] = key
        by_pages: dict[int, set[int]] = {}
        for length, _ in wanted:
            by_pages.setdefault(-(-(16 + max(length, MINIMUM_VALUE_BYTES)) // PAGE_BYTES), set()).add(length)
        for number in values:
            for length in by_pages.get(overflow_pages(self._file, number), ()):
                offset, stored = number * PAGE_BYTES + 16, bytearray(length)
                if not self._file.read_into(memoryview(stored), offset):
                    continue  # the file was cut off within it
                found = wanted.get((length, keys.checksum(stored)))
                if found is not None:
                    finds.places[found] = (offset, max(length, MINIMUM_VALUE_BYTES))
