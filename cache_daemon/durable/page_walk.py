"""Page walk: verifies all trees of a data file.

It checks that every reachable page is visited once, that no page is both used and free, that keys ascend and are in the
range of their branch pages, and that counts equal the counts in the database records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise

from cache_daemon.durable.durable_tier import PAGE_BYTES
from cache_daemon.durable.lmdb_file import (
    MAX_DEPTH,
    NO_PAGE,
    Database,
    LmdbCorruption,
    MetaPage,
    Node,
    PageFile,
    branch_nodes,
    leaf_nodes,
    readable_leaf_nodes,
)


def _lies_between(nodes: list[Node], least: bytes | None, above: bytes | None) -> bool:
    if not nodes or len(nodes[0].key) == 8 or len(nodes[-1].key) == 8:
        return True
    return (least is None or nodes[0].key >= least) and (above is None or nodes[-1].key < above)


class PageWalk:
    """One walk over all trees of one transaction.

    With ``lenient`` a corrupt page is noted in ``problems`` and skipped; otherwise LmdbCorruption is raised. ``used``
    has a byte per page: 1 for visited pages.
    """

    def __init__(self, file: PageFile, meta: MetaPage, lenient: bool = False) -> None:
        self.file, self.meta, self.lenient = file, meta, lenient
        self.problems: list[str] = []
        pages = min(meta.last_page + 1, max(2, -(-file.size_bytes // PAGE_BYTES)))
        self.used = bytearray(pages)
        self.used[:2] = b"\1\1"

    def _report(self, corruption: LmdbCorruption) -> None:
        if not self.lenient:
            raise corruption
        self.problems.append(str(corruption))

    def take(self, number: int, count: int = 1) -> None:
        """Mark pages as used. Raises LmdbCorruption for pages already used or outside the file."""
        if not 2 <= number <= number + count <= len(self.used):
            raise LmdbCorruption(f"page {number} is not in the file")
        if self.used.find(1, number, number + count) >= 0:
            raise LmdbCorruption(f"page {number} is used twice")
        self.used[number : number + count] = b"\1" * count

    def leaves(self, tree: Database, order: Callable[[bytes], object] = bytes) -> Iterator[list[Node]]:
        """Yield the entries of a tree in key order, one page at a time.

        Raises LmdbCorruption, OSError.
        """
        counts = [0, 0, 0]
        entries = 0
        last: object = None
        if tree.root != NO_PAGE:
            for nodes in self._below(tree.root, 1, tree.depth, counts, None, None):
                found = [order(node.key) for node in nodes]
                if last is not None:
                    found.insert(0, last)
                if any(not a < b for a, b in pairwise(found)):  # type: ignore[operator]
                    self._report(LmdbCorruption("keys are out of order"))
                last = found[-1] if found else last
                entries += len(nodes)
                yield nodes
        if (*counts, entries) != (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries):
            self._report(LmdbCorruption("a database's counts are not those of its pages"))

    def nodes(self, tree: Database, order: Callable[[bytes], object] = bytes) -> Iterator[Node]:
        """Yield the entries of ``leaves`` one at a time."""
        return (node for leaf in self.leaves(tree, order) for node in leaf)

    def _below(
        self, number: int, depth: int, deepest: int, counts: list[int], least: bytes | None, above: bytes | None
    ) -> Iterator[list[Node]]:
        """Yield the leaves below a page.

        Reports a leaf whose keys are not from ``least`` to below ``above``. Integer keys are not compared.
        """
        children: list[tuple[bytes, int]] = []
        try:
            if depth > min(deepest, MAX_DEPTH):
                raise LmdbCorruption(f"page {number} is deeper than its tree")
            self.take(number)
            page = self.file.page(number)
            if depth < deepest:
                children = branch_nodes(page, number)
                for _, child in children:
                    self.file.will_need(child * PAGE_BYTES if child < len(self.used) else 0, PAGE_BYTES)
                counts[0] += 1
            else:
                counts[1] += 1
                nodes = self._leaf(page, number)
        except LmdbCorruption as corruption:
            self._report(corruption)
            return
        if depth == deepest:
            if not _lies_between(nodes, least, above):
                self._report(LmdbCorruption(f"page {number} is not where its branch page leads"))
            yield self._with_values(nodes, counts)
            return
        for position, (key, child) in enumerate(children):
            low = key if position else least
            high = children[position + 1][0] if position + 1 < len(children) else above
            yield from self._below(child, depth + 1, deepest, counts, low, high)

    def _leaf(self, page: bytes, number: int) -> list[Node]:
        try:
            return leaf_nodes(page, number)
        except LmdbCorruption as corruption:
            self._report(corruption)
            return readable_leaf_nodes(page, number)

    def _with_values(self, nodes: list[Node], counts: list[int]) -> list[Node]:
        """Return the nodes whose value is in this page, or in pages that no other node uses."""
        kept = []
        for node in nodes:
            if node.value is None:
                try:
                    counts[2] += self.take_overflow(node)
                except LmdbCorruption as corruption:
                    self._report(corruption)
                    continue
            kept.append(node)
        return kept

    def take_overflow(self, node: Node) -> int:
        """Mark a large value's pages as used; return their number.

        Raises LmdbCorruption, OSError.
        """
        count = node.value_pages
        self.take(node.offset // PAGE_BYTES, count)
        return count

    def free_pages(self, before: int | None = None) -> bytearray:
        """Return a byte per page: 1 for free pages; with ``before``, only those that an earlier transaction freed.

        LMDB does not reuse a page in the transaction after the one that freed it. Raises LmdbCorruption when a page is
        free twice, or outside the file.
        """
        free = bytearray(len(self.used))
        for node in self.nodes(self.meta.free, order=lambda key: int.from_bytes(key, "little")):
            record = node.value if node.value is not None else self.file.read(node.offset, node.size_bytes)
            if len(record) < 8 or len(node.key) != 8:
                raise LmdbCorruption("a record of free pages is too short")
            if before is not None and int.from_bytes(node.key, "little") >= before:
                continue
            (count,) = struct.unpack_from("<Q", record)
            if 8 + 8 * count > len(record):
                raise LmdbCorruption("a record of free pages is too short")
            above = len(free)
            for (number,) in struct.iter_unpack("<Q", record[8 : 8 + 8 * count]):
                if not 2 <= number < above or free[number]:
                    raise LmdbCorruption(f"page {number} is free twice, or not in the file")
                free[number] = 1
                above = number
        return free

    def check_free(self) -> bytearray:
        """Return the free pages after all trees were walked. Raises LmdbCorruption if a used page is free."""
        free = self.free_pages()
        if int.from_bytes(free, "little") & int.from_bytes(self.used, "little"):
            raise LmdbCorruption("a page is free and used")
        return free
