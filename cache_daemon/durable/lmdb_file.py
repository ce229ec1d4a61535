"""LMDB file reader by ``pread``: corrupt pages raise here, where LMDB would crash.

LMDB trusts its file: it follows a flipped page number to an invalid address, and a truncated file causes SIGBUS. So
``page_walk`` checks all pages before LMDB opens a store. The reader supports data format 1 (LMDB 0.9.x, 64 bit, little
endian, pages of 4 KiB), which ``mdb.c`` describes: a page begins with a header of 16 bytes (number, flags and bounds),
followed by the offsets of its nodes. A large value occupies consecutive overflow pages, of which only the first has
such a header.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cache_daemon.durable.durable_tier import PAGE_BYTES

_HEADER = struct.Struct("<QHHHH")
_OVERFLOW = struct.Struct("<QHHI")
_NODE = struct.Struct("<HHHH")
_DATABASE = struct.Struct("<IHHQQQQQ")
_META = struct.Struct("<IIQQ48s48sQQ")
_HEADER_BYTES = 16
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, _OVERFLOW_PAGE, _META_PAGE, _DIRTY = 0x01, 0x02, 0x04, 0x08, 0x10
_BIG, _SUB_DATABASE = 0x01, 0x02
NO_PAGE = (1 << 64) - 1
_INTEGER_KEYS = 0x08
MAX_DEPTH = 32
_MAX_KEY_BYTES = 511


class LmdbCorruption(Exception):
    """A page that LMDB cannot have written; the text says which and why."""


@dataclass(frozen=True)
class Database:
    """Record of one tree."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, record: bytes) -> Database:
        """Parse a record. Raises LmdbCorruption."""
        pad, *values = _DATABASE.unpack(record)
        if pad not in (0, PAGE_BYTES):  # the free list stores the page size in this field
            raise LmdbCorruption("a database's record has impossible values")
        return cls(*values)


@dataclass(frozen=True)
class MetaPage:
    """Contents of a meta page: the roots as of a transaction."""

    free: Database
    main: Database
    last_page: int
    transaction: int

    @property
    def needed_bytes(self) -> int:
        """Length that the file must have to contain all pages of this transaction."""
        return (self.last_page + 1) * PAGE_BYTES


class Node(NamedTuple):
    """One key of a leaf.

    ``value`` holds a value within the page; a large value is on overflow pages and starts at ``offset`` of the file.
    """

    key: bytes
    size_bytes: int
    value: bytes | None
    offset: int
    is_database: bool = False

    @property
    def value_pages(self) -> int:
        """Number of pages of a large value."""
        return -(-(_HEADER_BYTES + self.size_bytes) // PAGE_BYTES)


class PageFile:
    """A data file open for reading.

    The last reference closes it: a reader may outlive the file's replacement. With ``skip_unreadable``, parts that the
    disk cannot read (EIO) count as corrupt, so that a repair saves the others.
    """

    def __init__(self, path: Path, *, skip_unreadable: bool = False) -> None:
        """Open the file. Raises OSError."""
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._skip_unreadable = skip_unreadable
        weakref.finalize(self, os.close, self.handle)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.handle).st_size

    def read_into(self, target: memoryview, offset: int) -> bool:
        """Fill ``target`` without the GIL; False when the file is too short or counts as corrupt. Raises OSError."""
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self.handle, [target[done:]], offset + done)
            except OSError as error:
                if not self._skip_unreadable or error.errno != errno.EIO:
                    raise
                return False
            if not got:
                return False
            done += got
        return True

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read bytes. Raises OSError, and LmdbCorruption for a file that is too short or counts as corrupt."""
        try:
            found = os.pread(self.handle, size_bytes, offset)
        except OSError:
            found = b""  # ``read_into`` tries again, and decides
        if len(found) == size_bytes:
            return found
        whole = bytearray(size_bytes)
        if not self.read_into(memoryview(whole), offset):
            raise LmdbCorruption(f"the file cannot be read to byte {offset + size_bytes}")
        return bytes(whole)

    def page(self, number: int) -> bytes:
        return self.read(number * PAGE_BYTES, PAGE_BYTES)

    def will_need(self, offset: int, size_bytes: int) -> None:
        """Ask the kernel to read ahead."""
        os.posix_fadvise(self.handle, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def metas(self) -> list[MetaPage]:
        """Return the intact meta pages, newest first. Raises OSError, and LmdbCorruption if none is intact."""
        found: list[MetaPage] = []
        reason = "there is no meta page"
        for number in (0, 1):
            try:
                found.append(self._meta(number))
            except LmdbCorruption as corruption:
                reason = str(corruption)
        if not found:
            raise LmdbCorruption(reason)
        return sorted(found, key=lambda meta: -meta.transaction)

    def _meta(self, number: int) -> MetaPage:
        page = self.page(number)
        named, _, flags, _, _ = _HEADER.unpack_from(page)
        magic, version, address, _, free, main, last_page, transaction = _META.unpack_from(page, _HEADER_BYTES)
        if magic != _MAGIC or version != _DATA_VERSION or named != number or flags != _META_PAGE:
            raise LmdbCorruption(f"page {number} is no meta page of LMDB data format {_DATA_VERSION}")
        (page_bytes,) = struct.unpack_from("<I", free)
        trees = Database.parse(free), Database.parse(main)
        is_plain = page_bytes == PAGE_BYTES and not address and main[:4] == bytes(4) and last_page >= 1
        if not is_plain or trees[0].flags != _INTEGER_KEYS or trees[1].flags:
            raise LmdbCorruption(f"meta page {number} has impossible values")
        return MetaPage(*trees, last_page, transaction)


def overflow_pages(file: PageFile, number: int) -> int:
    """Return the number of pages of a large value that begins at a page, or 0.

    Raises LmdbCorruption, OSError.
    """
    named, _, flags, pages = _OVERFLOW.unpack(file.read(number * PAGE_BYTES, _HEADER_BYTES))
    return pages if named == number and flags & ~_DIRTY == _OVERFLOW_PAGE else 0


def check_overflow(file: PageFile, node: Node) -> None:
    """Check the page header of a large value, which LMDB trusts when it removes the value.

    Raises LmdbCorruption, OSError.
    """
    number = node.offset // PAGE_BYTES
    if overflow_pages(file, number) != node.value_pages:
        raise LmdbCorruption(f"page {number} is not the start of its value")


def database_of(node: Node) -> Database:
    """Parse the record of a named database. Raises LmdbCorruption."""
    if not node.is_database or node.value is None or len(node.value) != _DATABASE.size:
        raise LmdbCorruption(f"{node.key[:16]!r} is no database")
    found = Database.parse(node.value)
    if found.flags:
        raise LmdbCorruption(f"database {node.key[:16]!r} has flags {found.flags:#x}")
    return found


def _places(page: bytes, number: int, flags: int) -> tuple[int, ...]:
    """Return the offsets of a page's nodes. Raises LmdbCorruption."""
    named, _, found, lower, upper = _HEADER.unpack_from(page)
    if named != number or found & ~_DIRTY != flags:
        raise LmdbCorruption(f"page {number} is not what points to it says")
    if not _HEADER_BYTES <= lower <= upper <= PAGE_BYTES or lower & 1:
        raise LmdbCorruption(f"page {number} has impossible bounds")
    places = struct.unpack_from(f"<{(lower - _HEADER_BYTES) // 2}H", page, _HEADER_BYTES)
    if places and not upper <= min(places) <= max(places) <= PAGE_BYTES - _NODE.size:
        raise LmdbCorruption(f"page {number} has a node outside of it")
    return places


def leaf_nodes(page: bytes, number: int) -> list[Node]:
    """Return the entries of a leaf page. Raises LmdbCorruption."""
    return [_leaf_node(page, number, place) for place in _places(page, number, LEAF)]


def readable_leaf_nodes(page: bytes, number: int) -> list[Node]:
    """Return a corrupt leaf page's readable entries; the caller must check them.

    The page's number or its kind must be right. If the page does not say where its node list ends, the list is read
    until an offset lies outside the nodes in use. Removed nodes have lower offsets.
    """
    named, _, flags, lower, upper = _HEADER.unpack_from(page)
    if named != number and flags & ~_DIRTY != LEAF:
        return []
    is_bounded = _HEADER_BYTES <= lower <= upper and not lower & 1
    found = []
    for (place,) in struct.iter_unpack("<H", page[_HEADER_BYTES : lower if is_bounded else PAGE_BYTES]):
        if not is_bounded and not max(upper, _HEADER_BYTES) <= place <= PAGE_BYTES - _NODE.size:
            break
        with contextlib.suppress(LmdbCorruption, struct.error):
            found.append(_leaf_node(page, number, place))
    return found


def _leaf_node(page: bytes, number: int, place: int) -> Node:
    low, high, flags, key_bytes = _NODE.unpack_from(page, place)
    data = place + 8 + key_bytes
    size = low | high << 16
    end = data + (8 if flags == _BIG else size)
    if not key_bytes or key_bytes > _MAX_KEY_BYTES or flags > _SUB_DATABASE or end > PAGE_BYTES:
        raise LmdbCorruption(f"page {number} has an impossible node")
    key = page[place + 8 : data]
    if flags == _BIG:
        return Node(key, size, None, int.from_bytes(page[data:end], "little") * PAGE_BYTES + _HEADER_BYTES, False)
    return Node(key, size, page[data:end], 0, flags == _SUB_DATABASE)


def branch_nodes(page: bytes, number: int) -> list[tuple[bytes, int]]:
    """Return the ``(least key, page number)`` of a branch page's children.

    Raises LmdbCorruption.
    """
    found = []
    for place in _places(page, number, BRANCH):
        low, high, top, key_bytes = _NODE.unpack_from(page, place)
        if key_bytes > _MAX_KEY_BYTES or place + _NODE.size + key_bytes > PAGE_BYTES:
            raise LmdbCorruption(f"page {number} has an impossible node")
        found.append((page[place + _NODE.size : place + _NODE.size + key_bytes], low | high << 16 | top << 32))
    if not found:
        raise LmdbCorruption(f"branch page {number} is empty")
    return found


class KeyLookup:
    """Finds entries of one transaction by key.

    Caches the pages that it reads; use it for one group of lookups.
    """

    def __init__(self, file: PageFile, meta: MetaPage) -> None:
        self._file, self._meta = file, meta
        self._pages: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._trees: dict[bytes, Database] = {}

    def find(self, database: bytes, key: bytes) -> Node | None:
        """Return the node of a key, or None. Raises LmdbCorruption, OSError."""
        if database not in self._trees:
            node = self._find(self._meta.main, database)
            if node is None:
                raise LmdbCorruption(f"database {database.decode()} is not there")
            self._trees[database] = database_of(node)
        return self._find(self._trees[database], key)

    def value(self, node: Node) -> bytes:
        """Return the value of a node. Raises LmdbCorruption, OSError."""
        return node.value if node.value is not None else self._file.read(node.offset, node.size_bytes)

    def _page(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        if number not in self._pages:
            page = self._file.page(number)
            self._pages[number] = page, _places(page, number, kind)
        return self._pages[number]

    def _find(self, tree: Database, key: bytes) -> Node | None:
        number = tree.root
        if number == NO_PAGE:
            return None
        for _ in range(min(tree.depth, MAX_DEPTH) - 1):
            page, places = self._page(number, BRANCH)
            # The last child whose least key is not above the key. LMDB does not store the least key of the first child.
            child = max(1, bisect_right(places, key, lo=1, key=lambda place: _key_at(page, place)))
            low, high, top, _ = _NODE.unpack_from(page, places[child - 1])
            number = low | high << 16 | top << 32
        page, places = self._page(number, LEAF)
        at = bisect_left(places, key, key=lambda place: _key_at(page, place))
        if at == len(places) or _key_at(page, places[at]) != key:
            return None
        return _leaf_node(page, number, places[at])


def _key_at(page: bytes, place: int) -> bytes:
    return page[place + 8 : place + 8 + page[place + 6] + (page[place + 7] << 8)]
