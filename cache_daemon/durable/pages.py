"""Reads and checks an LMDB file by ``pread``, without LMDB: damaged pages raise here, where LMDB would crash.

LMDB trusts its file. A flipped page number is an invalid address to it, and a truncated file a SIGBUS. So a store is
walked here before LMDB opens it: every page reachable from the newest sound meta page is visited once, no page is both
used and free, keys ascend, and counts are those of the database records. Data format 1 (LMDB 0.9.x, 64 bit, little
endian, pages of 4 KiB), as described by ``mdb.c``: a page has its number, flags and bounds in 16 bytes, then offsets of
nodes; a large value lies in consecutive overflow pages behind one such header.
"""

from __future__ import annotations

import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cache_daemon.durable.tier import PAGE_BYTES

_HEADER = struct.Struct("<QHHHH")
_OVERFLOW = struct.Struct("<QHHI")
_NODE = struct.Struct("<HHHH")
_DATABASE = struct.Struct("<IHHQQQQQ")
_META = struct.Struct("<IIQQ48s48sQQ")
_HEADER_BYTES = 16
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW_PAGE, _META_PAGE = 0x01, 0x02, 0x04, 0x08
_BIG, _SUB_DATABASE = 0x01, 0x02
_NO_PAGE = (1 << 64) - 1
_INTEGER_KEYS = 0x08
_MAX_DEPTH = 32
_MAX_KEY_BYTES = 511


class Damage(Exception):
    """A page that cannot be what LMDB wrote; the text says which and why."""


@dataclass(frozen=True)
class Database:
    """One tree's record."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, record: bytes) -> Database:
        return cls(*_DATABASE.unpack(record)[1:])


@dataclass(frozen=True)
class Meta:
    """What one of the two meta pages says: the roots as of a transaction."""

    free: Database
    main: Database
    last_page: int
    transaction: int

    @property
    def needed_bytes(self) -> int:
        """The file's length that this transaction relies on."""
        return (self.last_page + 1) * PAGE_BYTES


class Node(NamedTuple):
    """One key of a leaf. A value within the page is in ``value``; a large one lies at ``offset`` of the file."""

    key: bytes
    size_bytes: int
    value: bytes | None
    offset: int
    is_database: bool


class PageFile:
    """A data file open for reading. Closed when the last reference goes: a reader may outlive a replacement."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.handle)

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.handle).st_size

    def read_into(self, target: memoryview, offset: int) -> bool:
        """Fills ``target``; False when the file ends before. Raises OSError. Without the GIL."""
        done = 0
        while done < len(target):
            got = os.preadv(self.handle, [target[done:]], offset + done)
            if not got:
                return False
            done += got
        return True

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Raises Damage when the file ends before, OSError."""
        found = os.pread(self.handle, size_bytes, offset)
        if len(found) == size_bytes:
            return found
        whole = bytearray(size_bytes)
        if not self.read_into(memoryview(whole), offset):
            raise Damage(f"the file ends before byte {offset + size_bytes}")
        return bytes(whole)

    def page(self, number: int) -> bytes:
        return self.read(number * PAGE_BYTES, PAGE_BYTES)

    def will_need(self, offset: int, size_bytes: int) -> None:
        """Tells the kernel to read ahead."""
        os.posix_fadvise(self.handle, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def metas(self) -> list[Meta]:
        """The sound meta pages, newest first. Raises Damage when there is none, OSError."""
        found: list[Meta] = []
        reason = "there is no meta page"
        for number in (0, 1):
            try:
                found.append(self._meta(number))
            except Damage as damage:
                reason = str(damage)
        if not found:
            raise Damage(reason)
        return sorted(found, key=lambda meta: -meta.transaction)

    def _meta(self, number: int) -> Meta:
        page = self.page(number)
        named, _, flags, _, _ = _HEADER.unpack_from(page)
        magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(page, _HEADER_BYTES)
        if magic != _MAGIC or version != _DATA_VERSION or named != number or flags != _META_PAGE:
            raise Damage(f"page {number} is no meta page of LMDB data format {_DATA_VERSION}")
        (page_bytes,) = struct.unpack_from("<I", free)
        trees = Database.parse(free), Database.parse(main)
        if page_bytes != PAGE_BYTES or trees[0].flags != _INTEGER_KEYS or trees[1].flags or last_page < 1:
            raise Damage(f"meta page {number} has impossible values")
        return Meta(*trees, last_page, transaction)


def database_of(node: Node) -> Database:
    """The record of a named database. Raises Damage."""
    if not node.is_database or node.value is None or len(node.value) != _DATABASE.size:
        raise Damage(f"{node.key[:16]!r} is no database")
    found = Database.parse(node.value)
    if found.flags:
        raise Damage(f"database {node.key[:16]!r} has flags {found.flags:#x}")
    return found


def _places(page: bytes, number: int, flags: int) -> tuple[int, ...]:
    """Where the nodes of a page begin. Raises Damage."""
    named, _, found, lower, upper = _HEADER.unpack_from(page)
    if named != number or found & ~0x10 != flags:
        raise Damage(f"page {number} is not what points to it says")
    if not _HEADER_BYTES <= lower <= upper <= PAGE_BYTES or lower & 1:
        raise Damage(f"page {number} has impossible bounds")
    places = struct.unpack_from(f"<{(lower - _HEADER_BYTES) // 2}H", page, _HEADER_BYTES)
    if places and not upper <= min(places) <= max(places) <= PAGE_BYTES - _NODE.size:
        raise Damage(f"page {number} has a node outside of it")
    return places


def leaf_nodes(page: bytes, number: int) -> list[Node]:
    """The entries of a leaf page. Raises Damage."""
    return [_leaf_node(page, number, place) for place in _places(page, number, _LEAF)]


def _leaf_node(page: bytes, number: int, place: int) -> Node:
    low, high, flags, key_bytes = _NODE.unpack_from(page, place)
    data = place + 8 + key_bytes
    size = low | high << 16
    end = data + (8 if flags == _BIG else size)
    if not key_bytes or key_bytes > _MAX_KEY_BYTES or flags > _SUB_DATABASE or end > PAGE_BYTES:
        raise Damage(f"page {number} has an impossible node")
    key = page[place + 8 : data]
    if flags == _BIG:
        return Node(key, size, None, int.from_bytes(page[data:end], "little") * PAGE_BYTES + _HEADER_BYTES, False)
    return Node(key, size, page[data:end], 0, flags == _SUB_DATABASE)


def branch_nodes(page: bytes, number: int) -> list[tuple[bytes, int]]:
    """The ``(least key, page number)`` of a branch page's children. Raises Damage."""
    found = []
    for place in _places(page, number, _BRANCH):
        low, high, top, key_bytes = _NODE.unpack_from(page, place)
        if key_bytes > _MAX_KEY_BYTES or place + _NODE.size + key_bytes > PAGE_BYTES:
            raise Damage(f"page {number} has an impossible node")
        found.append((page[place + _NODE.size : place + _NODE.size + key_bytes], low | high << 16 | top << 32))
    if not found:
        raise Damage(f"branch page {number} is empty")
    return found


def _lies_between(nodes: list[Node], least: bytes | None, above: bytes | None) -> bool:
    if not nodes or len(nodes[0].key) == 8 or len(nodes[-1].key) == 8:
        return True
    return (least is None or nodes[0].key >= least) and (above is None or nodes[-1].key < above)


class Walk:
    """One walk over all trees of one transaction.

    With ``lenient`` a damaged page is noted in ``problems`` and skipped; otherwise Damage is raised.
    ``used`` has a byte per page: 1 for those that were visited.
    """

    def __init__(self, file: PageFile, meta: Meta, lenient: bool = False) -> None:
        self.file, self.meta, self.lenient = file, meta, lenient
        self.problems: list[str] = []
        pages = min(meta.last_page + 1, max(2, -(-file.size_bytes // PAGE_BYTES)))
        self.used = bytearray(pages)
        self.used[:2] = b"\1\1"

    def _report(self, damage: Damage) -> None:
        if not self.lenient:
            raise damage
        self.problems.append(str(damage))

    def take(self, number: int, count: int = 1) -> None:
        """Marks pages as used. Raises Damage when they were, or are not in the file."""
        if not 2 <= number <= number + count <= len(self.used):
            raise Damage(f"page {number} is not in the file")
        if self.used.find(1, number, number + count) >= 0:
            raise Damage(f"page {number} is used twice")
        self.used[number : number + count] = b"\1" * count

    def leaves(self, tree: Database, order: Callable[[bytes], object] = bytes) -> Iterator[list[Node]]:
        """The entries of a tree in the order of their keys, a page's at a time. Raises Damage, OSError."""
        counts = [0, 0, 0]
        entries = 0
        last: object = None
        if tree.root != _NO_PAGE:
            for nodes in self._below(tree.root, 1, tree.depth, counts, None, None):
                found = [order(node.key) for node in nodes]
                if last is not None:
                    found.insert(0, last)
                if any(not a < b for a, b in pairwise(found)):  # type: ignore[operator]
                    self._report(Damage("keys are out of order"))
                last = found[-1] if found else last
                entries += len(nodes)
                yield nodes
        if (*counts, entries) != (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries):
            self._report(Damage("a database's counts are not those of its pages"))

    def nodes(self, tree: Database, order: Callable[[bytes], object] = bytes) -> Iterator[Node]:
        """``leaves``, one entry at a time."""
        return (node for leaf in self.leaves(tree, order) for node in leaf)

    def _below(
        self, number: int, depth: int, deepest: int, counts: list[int], least: bytes | None, above: bytes | None
    ) -> Iterator[list[Node]]:
        """The leaves below a page; their keys lie between what its branch page says. Integer keys are not compared."""
        children: list[tuple[bytes, int]] = []
        try:
            if depth > min(deepest, _MAX_DEPTH):
                raise Damage(f"page {number} is deeper than its tree")
            self.take(number)
            page = self.file.page(number)
            if depth < deepest:
                children = branch_nodes(page, number)
                for _, child in children:
                    self.file.will_need(child * PAGE_BYTES if child < len(self.used) else 0, PAGE_BYTES)
                counts[0] += 1
            else:
                nodes = leaf_nodes(page, number)
                counts[1] += 1
        except Damage as damage:
            self._report(damage)
            return
        if depth == deepest:
            if not _lies_between(nodes, least, above):
                self._report(Damage(f"page {number} is not where its branch page leads"))
            yield self._with_values(nodes, counts)
            return
        for position, (key, child) in enumerate(children):
            low = key if position else least
            high = children[position + 1][0] if position + 1 < len(children) else above
            yield from self._below(child, depth + 1, deepest, counts, low, high)

    def _with_values(self, nodes: list[Node], counts: list[int]) -> list[Node]:
        """The nodes whose value is in this page, or in pages that nothing else uses."""
        kept = []
        for node in nodes:
            if node.value is None:
                try:
                    counts[2] += self.take_overflow(node)
                except Damage as damage:
                    self._report(damage)
                    continue
            kept.append(node)
        return kept

    def take_overflow(self, node: Node) -> int:
        """Marks a large value's pages as used; returns how many. Raises Damage, OSError."""
        number = node.offset // PAGE_BYTES
        count = -(-(_HEADER_BYTES + node.size_bytes) // PAGE_BYTES)
        self.take(number, count)
        return count

    def check_overflow(self, node: Node) -> None:
        """That the header of a large value's pages is right: LMDB trusts it when the value is removed."""
        number = node.offset // PAGE_BYTES
        named, _, flags, pages = _OVERFLOW.unpack(self.file.read(number * PAGE_BYTES, _HEADER_BYTES))
        if named != number or flags & ~0x10 != _OVERFLOW_PAGE or pages != -(-(16 + node.size_bytes) // PAGE_BYTES):
            raise Damage(f"page {number} is not the start of its value")

    def free_pages(self) -> bytearray:
        """A byte per page: 1 for those that are free. Raises Damage when one is free twice, or used as well."""
        free = bytearray(len(self.used))
        for node in self.nodes(self.meta.free, order=lambda key: int.from_bytes(key, "little")):
            record = node.value if node.value is not None else self.file.read(node.offset, node.size_bytes)
            if len(record) < 8 or len(node.key) != 8:
                raise Damage("a record of free pages is too short")
            (count,) = struct.unpack_from("<Q", record)
            if 8 + 8 * count > len(record):
                raise Damage("a record of free pages is too short")
            above = len(free)
            for (number,) in struct.iter_unpack("<Q", record[8 : 8 + 8 * count]):
                if not 2 <= number < above or free[number]:
                    raise Damage(f"page {number} is free twice, or not in the file")
                free[number] = 1
                above = number
        return free

    def check_free(self) -> bytearray:
        """The free pages, once all trees were walked: none of them is used. Raises Damage."""
        free = self.free_pages()
        if int.from_bytes(free, "little") & int.from_bytes(self.used, "little"):
            raise Damage("a page is free and used")
        return free


class Finder:
    """Finds entries of one transaction by key. Pages that were read are kept; use it for one group of look-ups."""

    def __init__(self, file: PageFile, meta: Meta) -> None:
        self._file, self._meta = file, meta
        self._pages: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._trees: dict[bytes, Database] = {}

    def find(self, database: bytes, key: bytes) -> Node | None:
        """Raises Damage, OSError."""
        if database not in self._trees:
            node = self._find(self._meta.main, database)
            if node is None:
                raise Damage(f"database {database.decode()} is not there")
            self._trees[database] = database_of(node)
        return self._find(self._trees[database], key)

    def value(self, node: Node) -> bytes:
        """Raises Damage, OSError."""
        return node.value if node.value is not None else self._file.read(node.offset, node.size_bytes)

    def _page(self, number: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        if number not in self._pages:
            page = self._file.page(number)
            self._pages[number] = page, _places(page, number, kind)
        return self._pages[number]

    def _find(self, tree: Database, key: bytes) -> Node | None:
        number = tree.root
        if number == _NO_PAGE:
            return None
        for _ in range(min(tree.depth, _MAX_DEPTH) - 1):
            page, places = self._page(number, _BRANCH)
            # The last child whose least key is not above; the first one's is not written.
            child = max(1, bisect_right(places, key, lo=1, key=lambda place: _key_at(page, place)))
            low, high, top, _ = _NODE.unpack_from(page, places[child - 1])
            number = low | high << 16 | top << 32
        page, places = self._page(number, _LEAF)
        at = bisect_left(places, key, key=lambda place: _key_at(page, place))
        if at == len(places) or _key_at(page, places[at]) != key:
            return None
        return _leaf_node(page, number, places[at])


def _key_at(page: bytes, place: int) -> bytes:
    return page[place + 8 : place + 8 + page[place + 6] + (page[place + 7] << 8)]
