"""Prefix index: token-granular longest-prefix match.

Each parent's prefix hash maps to its children with their token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvsidecar.keys import TOKEN_BYTES
from sortedcontainers import SortedDict, SortedList

from cache_daemon.store.bloom_filter import CountingBloomFilter
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.common_bytes import common_bytes, nearest
from cache_daemon.store.content_index import ContentIndex

# Enough for 2^20 tokens in chunks of 128.
MAX_MATCHED_CHUNKS = 8192
# Heap of an indexed chunk in all tables of the daemon, without its token ids; 7 KB were measured (CPython 3.11).
_CHUNK_BYTES = 8 << 10
# Maximal number of branches (different cuts of one prompt) that a match follows, and of sibling lengths that it tries.
_MAX_BRANCHES, _MAX_LENGTHS = 256, 64


class MatchedChunk(NamedTuple):
    """A chunk and the number of its leading tokens that match."""

    chunk: Chunk
    tokens: int


@dataclass(slots=True)
class _Siblings:
    """Children of one parent, sorted by token bytes."""

    by_tokens: SortedDict[bytes, Chunk] = field(default_factory=SortedDict)
    lengths: Counter[int] = field(default_factory=Counter)  # length in bytes -> number of children

    def add(self, chunk: Chunk) -> None:
        self.by_tokens[chunk.ids] = chunk
        self.lengths[len(chunk.ids)] += 1

    def remove(self, chunk: Chunk) -> None:
        del self.by_tokens[chunk.ids]
        self.lengths[len(chunk.ids)] -= 1
        if not self.lengths[len(chunk.ids)]:
            del self.lengths[len(chunk.ids)]

    def nearest(self, rest: bytes) -> tuple[Chunk, int]:
        """Return the child with the longest common prefix with ``rest``, and that prefix's length in bytes."""
        return nearest(self.by_tokens, rest)


class PrefixIndex:
    """Committed chunks by prefix hash and by parent, mirrored in a content index and a Bloom filter.

    Not thread-safe.
    """

    def __init__(self, bloom_filter: CountingBloomFilter | None = None) -> None:
        self.bloom_filter = bloom_filter
        self._chunks: dict[bytes, Chunk] = {}
        self._sorted: SortedDict[bytes, SortedList[bytes]] = SortedDict()  # root -> prefix hashes
        self._children: dict[bytes, Chunk | _Siblings] = {}  # most parents have one child
        self.contents = ContentIndex()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def memory_bytes(self, more_chunks: int = 0, more_tokens: int = 0) -> int:
        """Return an upper bound of the heap that the chunks take in all tables of the daemon, with some more chunks."""
        return (len(self) + more_chunks) * _CHUNK_BYTES + (self.tokens + more_tokens) * TOKEN_BYTES

    def get(self, prefix_hash: bytes) -> Chunk | None:
        return self._chunks.get(prefix_hash)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk. Raises KeyError for an existing key.

        A second chunk of the same name would make the maps inconsistent.
        """
        if chunk.key in self._chunks:
            raise KeyError(f"the index has a chunk {chunk.key.hex()} already")
        siblings = self._children.get(chunk.parent_key)
        if siblings is None:
            self._children[chunk.parent_key] = chunk
        elif isinstance(siblings, Chunk):
            both = _Siblings()
            both.add(siblings)
            both.add(chunk)
            self._children[chunk.parent_key] = both
        else:
            siblings.add(chunk)
        self._chunks[chunk.key] = chunk
        self._sorted.setdefault(chunk.root, SortedList()).add(chunk.key)
        self.contents.add(chunk)
        self.tokens += chunk.tokens
        if self.bloom_filter is not None:
            self.bloom_filter.add(chunk)

    def remove(self, chunk: Chunk) -> None:
        siblings = self._children[chunk.parent_key]
        if isinstance(siblings, Chunk):
            del self._children[chunk.parent_key]
        else:
            siblings.remove(chunk)
            if len(siblings.by_tokens) == 1:
                self._children[chunk.parent_key] = siblings.by_tokens.peekitem(0)[1]
        del self._chunks[chunk.key]
        of_root = self._sorted[chunk.root]
        of_root.remove(chunk.key)
        if not of_root:
            del self._sorted[chunk.root]
        self.contents.remove(chunk)
        self.tokens -= chunk.tokens
        if self.bloom_filter is not None:
            self.bloom_filter.remove(chunk)

    def has_children(self, chunk: Chunk) -> bool:
        return chunk.key in self._children

    def children(self, parent: bytes) -> list[Chunk]:
        found = self._children.get(parent)
        if found is None:
            return []
        # Unordered: building the ordered list takes thirty times as long.
        return [found] if isinstance(found, Chunk) else list(dict.values(found.by_tokens))

    def continues(self, parent: bytes, tokens: bytes, at: int) -> bool:
        """Return True if a child of ``parent`` matches ``tokens`` completely from byte ``at`` on."""
        found = self._children.get(parent)
        if found is None or isinstance(found, Chunk):
            return found is not None and tokens.startswith(found.ids, at)
        return any(tokens[at : at + length] in found.by_tokens for length in islice(found.lengths, _MAX_LENGTHS))

    def subtree(self, chunk: Chunk) -> list[Chunk]:
        """Return the chunk and its descendants, parents before children."""
        out = [chunk]
        for found in out:
            out.extend(self.children(found.key))
        return out

    def path(self, chunk: Chunk) -> list[Chunk]:
        """Return the chunk's ancestors and the chunk, root first."""
        out = [chunk]
        while (parent := self._chunks.get(out[-1].parent_key)) is not None:
            out.append(parent)
        return out[::-1]

    def page_of_root(self, root: bytes, after: bytes, limit: int) -> list[Chunk]:
        """Return a page of a tenant's chunks ordered by prefix hash."""
        keys = self._sorted.get(root, ())
        if not keys:
            return []
        first = keys.bisect_right(after)
        return [self._chunks[key] for key in keys[first : first + limit]]

    def has_chunks_of(self, root: bytes) -> bool:
        """Return True if a tenant has chunks."""
        return root in self._sorted

    def roots_from(self, first: bytes) -> Iterator[bytes]:
        """Yield all roots that have chunks, in order, beginning at ``first``."""
        found: Iterator[bytes] = self._sorted.irange(first)
        return found

    def superseded_by(self, chunk: Chunk) -> list[Chunk]:
        """Return childless siblings whose tokens are a proper prefix of the chunk's."""
        siblings = self._children[chunk.parent_key]
        if isinstance(siblings, Chunk):
            return []
        tokens = chunk.ids
        lengths = islice(siblings.lengths, _MAX_LENGTHS)
        found = (siblings.by_tokens.get(tokens[:length]) for length in lengths if length < len(tokens))
        return [s for s in found if s is not None and not self.has_children(s)]

    def match(self, root: bytes, tokens: bytes) -> list[MatchedChunk]:
        """Return the longest stored prefix of ``tokens`` (uint32 little-endian).

        All chunks but the last match completely. The last may match only with its first tokens, which are valid because
        attention is causal. Compares token ids, never only hashes. Takes time linear in the matched tokens, and finds
        at most ``MAX_MATCHED_CHUNKS`` chunks. If a prompt is stored in many different cuts, the match follows only some
        of them, so that it takes no longer.
        """
        best, last, shared_last = 0, None, 0
        open_ends, ways, steps = [(root, 0, 0)], 0, 0
        while open_ends and ways < _MAX_BRANCHES and steps < 2 * MAX_MATCHED_CHUNKS:
            parent, at, depth = open_ends.pop()
            ways, steps = ways + 1, steps - depth
            siblings = self._children.get(parent)
            # Most parents on a path have one child, so a match of a long prompt spends its time in this loop.
            only: Chunk | None = None
            while isinstance(siblings, Chunk) and depth < MAX_MATCHED_CHUNKS and tokens.startswith(siblings.ids, at):
                only, at, depth = siblings, at + len(siblings.ids), depth + 1
                siblings = self._children.get(only.key)
            steps += depth
            if only is not None and at > best:
                best, last, shared_last = at, only, len(only.ids)
            if siblings is None or at == len(tokens) or depth == MAX_MATCHED_CHUNKS:
                continue
            # The list begins with the child that shares most tokens. It is pushed last, so it is followed first.
            for chunk, shared in reversed(list(self._continuations(siblings, tokens, at))):
                if at + shared > best:
                    best, last, shared_last = at + shared, chunk, shared
                if shared == len(chunk.ids):
                    open_ends.append((chunk.key, at + shared, depth + 1))
        if last is None:
            return []
        path = self.path(last)
        return [*[MatchedChunk(c, c.tokens) for c in path[:-1]], MatchedChunk(last, shared_last // TOKEN_BYTES)]

    @staticmethod
    def _continuations(siblings: Chunk | _Siblings, tokens: bytes, at: int) -> Iterator[tuple[Chunk, int]]:
        """Yield children that match ``tokens`` from ``at``, with the number of shared bytes.

        Yields all children that match completely, and the child with the longest partial match.
        """
        if isinstance(siblings, Chunk):
            own = siblings.ids
            shared = len(own) if tokens.startswith(own, at) else common_bytes(own, tokens[at : at + len(own)])
            if shared:
                yield siblings, shared
            return
        rest = tokens[at : at + max(siblings.lengths)]
        chunk, shared = siblings.nearest(rest)
        if shared:
            yield chunk, shared
        for length in islice(siblings.lengths, _MAX_LENGTHS):
            whole = siblings.by_tokens.get(rest[:length]) if length <= len(rest) else None
            if whole is not None and whole is not chunk:
                yield whole, length

    def check_integrity(self) -> None:
        """Raise AssertionError unless all maps and the Bloom filter hold the same chunks."""
        listed = [c for parent in self._children for c in self.children(parent)]
        assert len(listed) == len(self._chunks), "children and chunks differ in number"
        assert all(self._chunks.get(c.key) is c for c in listed), "a child is not in the index"
        assert sum(map(len, self._sorted.values())) == len(listed), "roots and chunks differ in number"
        assert len(self.contents) == len(self._chunks), "contents and chunks differ in number"
        assert self.tokens == sum(c.tokens for c in listed), "tokens do not add up"
        if self.bloom_filter is not None:
            self.bloom_filter.check_integrity(listed)
