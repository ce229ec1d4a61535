"""What a data file holds, found by walking its pages: strictly before LMDB may touch it, or leniently to save the rest.

The strict survey raises Damage at the first thing that LMDB did not write. The lenient one goes on: it skips what is
broken, takes an older transaction when the newest cannot be read, and finds leaves that nothing leads to any more.
Those are told from stale copies by the list of free pages; where that is damaged too, they are left out, so that
nothing that was deleted comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_daemon.durable.lmdb_file import Database, LmdbCorruption, MetaPage, Node, PageFile, database_of
from cache_daemon.durable.lost_pages import LostPageSearch
from cache_daemon.durable.page_walk import PageWalk
from cache_daemon.durable.record_format import (
    DATABASES,
    FORMAT,
    HEADERS,
    META,
    NOTES,
    PAYLOADS,
    RECENCY,
    CorruptRecord,
    Record,
    decode_record,
    decode_tick,
    verified,
)

LMDB_MAGIC = 0xBEEFC0DE.to_bytes(4, "little")


class UnsupportedVersion(Exception):
    """The file is sound but not a store of this version; the text says what it is."""


@dataclass
class StoreScan:
    """Everything found. ``places`` are offset and length of stored payloads; ``commit_matches`` says that the meta page
    is that of the last transaction."""

    file: PageFile
    meta: MetaPage | None = None
    format: bytes = b""
    key_check: bytes = b""
    commit_matches: bool = False
    records: dict[bytes, Record] = field(default_factory=dict)
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    notes: dict[bytes, bytes] = field(default_factory=dict)
    ticks: dict[bytes, int] = field(default_factory=dict)
    broken_headers: list[bytes] = field(default_factory=list)
    broken_notes: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def strict_scan(file: PageFile) -> StoreScan:
    """Raises Damage, UnsupportedVersion, OSError."""
    metas = _metas(file)
    if len(metas) < 2:
        raise LmdbCorruption("one of the two meta pages is damaged")
    meta = metas[0]
    if file.size_bytes < meta.needed_bytes:
        raise LmdbCorruption(f"the file has {file.size_bytes} of {meta.needed_bytes} bytes")
    found = StoreScanner(StoreScan(file), PageWalk(file, meta)).run(check_free=True)
    found.meta = meta
    return found


def lenient_scan(file: PageFile) -> StoreScan:
    """Raises UnsupportedVersion, OSError."""
    try:
        metas = _metas(file)
    except LmdbCorruption as corruption:
        return StoreScan(file, problems=[str(corruption)])
    found = []
    for meta in metas:
        surveyor = StoreScanner(StoreScan(file), PageWalk(file, meta, lenient=True))
        scan = surveyor.run(check_free=False)
        if scan.problems:
            LostPageSearch(scan, surveyor).search()
        found.append(scan)
        if not scan.problems:
            break
    trusted = [scan for scan in found if scan.commit_matches and scan.records]
    return trusted[0] if trusted else max(found, key=lambda scan: len(scan.records.keys() & scan.places.keys()))


def _metas(file: PageFile) -> list[MetaPage]:
    try:
        return file.metas()
    except LmdbCorruption:
        head = file.read(0, min(64, file.size_bytes))
        at = head.find(LMDB_MAGIC)
        version = int.from_bytes(head[at + 4 : at + 8], "little") if at >= 0 else 0
        if version in (2, 3):
            raise UnsupportedVersion(f"has LMDB data format {version}, which LMDB 0.9 does not read") from None
        raise


class StoreScanner:
    def __init__(self, scan: StoreScan, walk: PageWalk) -> None:
        self._found, self.walk, self._file = scan, walk, walk.file

    def run(self, check_free: bool) -> StoreScan:
        walk, found = self.walk, self._found
        trees: dict[bytes, Database] = {}
        nodes = list(walk.nodes(walk.meta.main))
        if nodes and not {node.key for node in nodes} & set(DATABASES):
            raise UnsupportedVersion("holds another program's data")
        for node in nodes:
            try:
                trees[node.key] = database_of(node)
            except LmdbCorruption as corruption:
                self._report(corruption)
        for name, tree in trees.items():
            for leaf in walk.leaves(tree):
                for node in leaf:
                    self.take(name, node)
        if not found.format and trees and not set(DATABASES) <= set(trees) and not found.problems:
            raise UnsupportedVersion("holds another program's data")
        if trees and (
            not found.format or set(trees) != set(DATABASES) or not (found.commit_matches and found.key_check)
        ):
            self._report(LmdbCorruption("a database or a record of the store itself is missing"))
        if check_free:
            walk.check_free()
        found.problems += walk.problems
        return found

    def _report(self, corruption: LmdbCorruption) -> None:
        if not self.walk.lenient:
            raise corruption
        self._found.problems.append(str(corruption))

    def value(self, node: Node) -> bytes:
        return node.value if node.value is not None else self._file.read(node.offset, node.size_bytes)

    def take(self, database: bytes, node: Node) -> None:
        found = self._found
        try:
            if database == PAYLOADS:
                if node.value is not None:
                    raise CorruptRecord("a payload without pages of its own")
                found.places[node.key] = (node.offset, node.size_bytes)
            elif database == HEADERS:
                found.records[node.key] = decode_record(node.key, self.value(node))
            elif database == NOTES:
                verified(NOTES, node.key, self.value(node))
                found.notes[node.key] = self.value(node)
            elif database == RECENCY:
                found.ticks[node.key] = decode_tick(node.key, self.value(node))
            elif database == META:
                self._take_meta(node)
        except (CorruptRecord, LmdbCorruption):
            if database == HEADERS:
                found.broken_headers.append(node.key)
            elif database == NOTES:
                found.broken_notes.append(node.key)

    def _take_meta(self, node: Node) -> None:
        """The store's own records. A format that cannot be checked is damage, unless it is format 1's plain digit."""
        stored = self.value(node)
        try:
            value = verified(META, node.key, stored)
        except CorruptRecord as error:
            if node.key == b"format" and stored.isdigit() and len(stored) < 8 and stored != FORMAT:
                raise UnsupportedVersion(f"has format version {stored.decode()!r}") from error
            self._report(LmdbCorruption(f"record {node.key[:16]!r} is damaged"))
            return
        if node.key == b"format":
            if value != FORMAT:
                raise UnsupportedVersion(f"has format version {value.decode(errors='replace')!r}")
            self._found.format = value
        elif node.key == b"key":
            self._found.key_check = value
        elif node.key == b"commit":
            self._found.commit_matches = int.from_bytes(value, "little") == self.walk.meta.transaction
            if not self._found.commit_matches:
                self._report(LmdbCorruption("the meta page is not that of the last transaction"))
