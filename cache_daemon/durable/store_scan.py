"""Store scan: finds all records of a data file by walking its pages.

The strict scan runs before LMDB may open the file. It raises LmdbCorruption at the first page that LMDB cannot have
written. The lenient scan collects everything that is still readable. It skips corrupt pages. It also finds leaves and
payloads that no page refers to any more, unless the list of free pages says that they were deleted. If that list is
corrupt too, the scan leaves out all pages that no page refers to, so that no deleted record returns. Only then, or if
the meta page is not that of the last transaction, it may use the transaction before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

from cache_daemon.durable.durable_tier import PAGE_BYTES
from cache_daemon.durable.lmdb_file import (
    Database,
    LmdbCorruption,
    MetaPage,
    Node,
    PageFile,
    database_of,
    overflow_pages,
    readable_leaf_nodes,
)
from cache_daemon.durable.page_walk import PageWalk
from cache_daemon.durable.record_format import (
    DATABASES,
    FORMAT,
    HEADERS,
    META,
    MINIMUM_VALUE_BYTES,
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
    """The file is intact but not a store of this version; the text describes the version.

    ``format`` is the format of a store of another release, else empty.
    """

    def __init__(self, text: str, format: str = "") -> None:
        super().__init__(text)
        self.format = format


@dataclass
class StoreScan:
    """Everything that a scan found.

    ``places`` has the offset and length of each stored payload; ``commit_matches`` says whether the meta page belongs
    to the last transaction, and is None if that is unreadable.
    """

    file: PageFile
    meta: MetaPage | None = None
    format: bytes = b""
    key_check: bytes = b""
    commit_matches: bool | None = None
    records: dict[bytes, Record] = field(default_factory=dict)
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    notes: dict[bytes, bytes] = field(default_factory=dict)
    ticks: dict[bytes, int] = field(default_factory=dict)
    broken_headers: list[bytes] = field(default_factory=list)
    broken_notes: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def strict_scan(file: PageFile) -> StoreScan:
    """Scan a file that must be intact. Raises LmdbCorruption, UnsupportedVersion, OSError."""
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
    """Scan a corrupt file for everything readable. Raises UnsupportedVersion, OSError."""
    try:
        metas = _metas(file)
    except LmdbCorruption as corruption:
        return StoreScan(file, problems=[str(corruption)])
    found: list[StoreScan] = []
    for meta in metas:
        surveyor = StoreScanner(StoreScan(file), PageWalk(file, meta, lenient=True))
        scan = surveyor.run(check_free=False)
        found.append(scan)
        if not scan.problems:
            break
        if LostPageSearch(scan, surveyor).search() and scan.commit_matches is not False:
            break
    trusted = [scan for scan in found if scan.commit_matches and scan.records]
    chosen = trusted[0] if trusted else max(found, key=lambda scan: len(_complete(scan)))
    if chosen is not found[0]:
        newest, used = _complete(found[0]), _complete(chosen)
        chosen.problems.insert(
            0,
            f"the newest transaction is unreadable; the one before is used: {len(newest - used)} chunks of the newest "
            f"are lost, and {len(used - newest)} chunks may have been removed in it",
        )
    return chosen


def _complete(scan: StoreScan) -> set[bytes]:
    return scan.records.keys() & scan.places.keys()


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
    """Walks the trees of one transaction and collects their records."""

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
        """Record an entry of ``meta``.

        A format record with a wrong checksum is corrupt, unless it is the plain digit of format 1.
        """
        stored = self.value(node)
        try:
            value = verified(META, node.key, stored)
        except CorruptRecord as error:
            if node.key == b"format" and stored.isdigit() and len(stored) < 8 and stored != FORMAT:
                raise _other_format(stored) from error
            self._report(LmdbCorruption(f"record {node.key[:16]!r} is damaged"))
            return
        if node.key == b"format":
            if value != FORMAT:
                raise _other_format(value)
            self._found.format = value
        elif node.key == b"key":
            self._found.key_check = value
        elif node.key == b"commit":
            self._found.commit_matches = int.from_bytes(value, "little") == self.walk.meta.transaction
            if not self._found.commit_matches:
                self._report(LmdbCorruption("the meta page is not that of the last transaction"))


def _other_format(value: bytes) -> UnsupportedVersion:
    text = value.decode(errors="replace")
    return UnsupportedVersion(f"has format version {text!r}", text if text.isalnum() else "unknown")


class LostPageSearch:
    """Search of unreachable pages, after a lenient walk.

    Finds leaves and payloads below a corrupt page. Checksums identify a leaf's records; a header's record identifies
    its payload by length and checksum. The search leaves out free pages, so that no deleted record returns. If the list
    of free pages is corrupt, it searches nothing.
    """

    def __init__(self, scan: StoreScan, scanner: StoreScanner) -> None:
        self._scan, self._scanner, self._file = scan, scanner, scan.file
        self._used = scanner.walk.used

    def search(self) -> bool:
        """Search all pages. Returns False if the list of free pages is corrupt. Raises OSError."""
        walk = self._scanner.walk
        try:
            free = PageWalk(walk.file, walk.meta).free_pages()
        except LmdbCorruption:
            return False
        values: list[int] = []
        number = 2
        while number < len(self._used):
            step = 1
            if not self._used[number] and not free[number]:
                with contextlib.suppress(LmdbCorruption):  # the file ends here, or the disk cannot read the page
                    step = self._search(number, values)
            number += step
        self._match(values)
        return True

    def _search(self, number: int, values: list[int]) -> int:
        """Search one page; return the length of its leaf or value in pages. Raises LmdbCorruption, OSError."""
        pages = overflow_pages(self._file, number)
        if pages:
            values.append(number)
            return min(pages, len(self._used))
        for node in readable_leaf_nodes(self._file.page(number), number):
            self._take(node)
        return 1

    def _take(self, node: Node) -> None:
        """Add a node to the database that its checksum identifies. ``_match`` finds large values."""
        scan = self._scan
        if node.value is None and node.size_bytes > len(self._used) * PAGE_BYTES:
            return
        for database, known in ((HEADERS, scan.records), (RECENCY, scan.ticks), (NOTES, scan.notes)):
            try:
                verified(database, node.key, self._scanner.value(node))
            except (CorruptRecord, LmdbCorruption):
                continue
            if node.key not in known:
                self._scanner.take(database, node)
            return

    def _match(self, values: list[int]) -> None:
        """Assign found payloads without a key to all records that lack this payload."""
        scan = self._scan
        wanted: dict[tuple[int, int], list[bytes]] = {}
        for key, record in scan.records.items():
            size = max(record.stored_length, MINIMUM_VALUE_BYTES)
            if scan.places.get(key, (0, 0))[1] != size:
                wanted.setdefault((record.stored_length, record.stored_checksum), []).append(key)
        lengths: dict[int, set[int]] = {}  # number of pages -> lengths of payloads
        for length, _ in wanted:
            lengths.setdefault(-(-(16 + max(length, MINIMUM_VALUE_BYTES)) // PAGE_BYTES), set()).add(length)
        ascending = {pages: sorted(found) for pages, found in lengths.items()}
        for number in values:
            offset = number * PAGE_BYTES + 16
            for length, checksum in self._checksums(offset, ascending.get(overflow_pages(self._file, number), [])):
                for key in wanted.get((length, checksum), ()):
                    scan.places[key] = (offset, max(length, MINIMUM_VALUE_BYTES))

    def _checksums(self, offset: int, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Yield each of the ascending lengths that a value may have, with the checksum; read the value once.

        Ends where the file ends.
        """
        stored = bytearray(max(0, min(max(lengths, default=0), self._file.size_bytes - offset)))
        if not self._file.read_into(memoryview(stored), offset):
            return
        digest, done = xxhash.xxh3_64(), 0
        for length in lengths:
            if length > len(stored):
                return
            digest.update(memoryview(stored)[done:length])
            done = length
            yield length, digest.intdigest()
