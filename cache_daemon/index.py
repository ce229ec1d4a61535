"""The prefix index: parent -> children, with their token ids, for token-granular longest-prefix search; and by content
hash, for chunks that were read in another context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from sortedcontainers import SortedDict

from cache_daemon.chunk import Chunk
from cache_daemon.summary import SummaryWriter

_TOKEN_BYTES = 4


def _sort_key(tokens: Sequence[int]) -> bytes:
    """Token ids big-endian, so that bytes sort as the ids do."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def _common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two keys share."""
    n = min(len(a), len(b)) // _TOKEN_BYTES
    if a[: n * _TOKEN_BYTES] == b[: n * _TOKEN_BYTES]:
        return n
    differ = np.frombuffer(a, ">u4", n) != np.frombuffer(b, ">u4", n)
    return int(differ.argmax())


@dataclass(slots=True)
class _Children:
    by_tokens: SortedDict[bytes, Chunk] = field(default_factory=SortedDict)
    lengths: Counter[int] = field(default_factory=Counter)  # length of a sort key -> how many


class PrefixIndex:
    """Committed chunks by prefix hash and by parent, kept in a ``summary`` too if there is one. Not thread-safe."""

    def __init__(self, summary: SummaryWriter | None = None) -> None:
        self.summary = summary
        self._chunks: dict[bytes, Chunk] = {}
        self._children: dict[bytes, _Children] = {}
        self._contents: dict[bytes, dict[bytes, Chunk]] = {}  # content hash -> prefix hash -> chunk
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def get(self, prefix_hash: bytes) -> Chunk | None:
        return self._chunks.get(prefix_hash)

    def add(self, chunk: Chunk) -> None:
        header = chunk.header
        siblings = self._children.setdefault(header.parent_prefix_hash, _Children())
        key = _sort_key(header.token_ids)
        siblings.by_tokens[key] = chunk
        siblings.lengths[len(key)] += 1
        self._chunks[chunk.key] = chunk
        self._contents.setdefault(header.content_hash, {})[chunk.key] = chunk
        self.tokens += len(header.token_ids)
        if self.summary is not None:
            self.summary.add(chunk)

    def remove(self, chunk: Chunk) -> None:
        header = chunk.header
        siblings = self._children[header.parent_prefix_hash]
        key = _sort_key(header.token_ids)
        del siblings.by_tokens[key]
        siblings.lengths[len(key)] -= 1
        if not siblings.lengths[len(key)]:
            del siblings.lengths[len(key)]
        if not siblings.by_tokens:
            del self._children[header.parent_prefix_hash]
        del self._chunks[chunk.key]
        same = self._contents[header.content_hash]
        del same[chunk.key]
        if not same:
            del self._contents[header.content_hash]
        self.tokens -= len(header.token_ids)
        if self.summary is not None:
            self.summary.remove(chunk)

    def has_children(self, chunk: Chunk) -> bool:
        return chunk.key in self._children

    def children(self, parent: bytes) -> list[Chunk]:
        found = self._children.get(parent)
        return list(found.by_tokens.values()) if found else []

    def subtree(self, chunk: Chunk) -> list[Chunk]:
        """The chunk and all that continue it, parents before children."""
        out = [chunk]
        for found in out:
            out.extend(self.children(found.key))
        return out

    def path(self, chunk: Chunk) -> list[Chunk]:
        """The chunk's ancestors and the chunk, first one first."""
        out = [chunk]
        while (parent := self._chunks.get(out[-1].header.parent_prefix_hash)) is not None:
            out.append(parent)
        return out[::-1]

    def superseded_by(self, chunk: Chunk) -> list[Chunk]:
        """Childless siblings whose tokens are a proper prefix of the chunk's."""
        siblings = self._children[chunk.header.parent_prefix_hash]
        key = _sort_key(chunk.header.token_ids)
        found = (siblings.by_tokens.get(key[:length]) for length in siblings.lengths if length < len(key))
        return [s for s in found if s is not None and not self.has_children(s)]

    def match(self, root: bytes, tokens: Sequence[int]) -> list[tuple[Chunk, int]]:
        """The longest stored prefix of ``tokens`` as ``[(chunk, matched tokens), ...]``.

        All but the last chunk match wholly; the last may match only at its start, which is as good, because
        attention is causal. Token ids are compared, never only hashes.
        """
        query = _sort_key(tokens)
        best: tuple[int, list[tuple[Chunk, int]]] = (0, [])
        open_paths: list[tuple[bytes, int, list[tuple[Chunk, int]]]] = [(root, 0, [])]
        while open_paths:
            parent, at, path = open_paths.pop()
            if at > best[0]:
                best = (at, path)
            siblings = self._children.get(parent)
            if siblings is None or at * _TOKEN_BYTES == len(query):
                continue
            rest = query[at * _TOKEN_BYTES :]
            chunk, shared = self._nearest(siblings, rest)
            if shared and at + shared > best[0]:
                best = (at + shared, [*path, (chunk, shared)])
            for length in siblings.lengths:
                whole = siblings.by_tokens.get(rest[:length]) if length <= len(rest) else None
                if whole is not None:
                    tokens_in = length // _TOKEN_BYTES
                    open_paths.append((whole.key, at + tokens_in, [*path, (whole, tokens_in)]))
        return best[1]

    def find_content(self, content_hash: bytes, tokens: Sequence[int]) -> Chunk | None:
        """A chunk with these tokens in whatever context: one in memory if there is, else the newest."""
        same = [c for c in self._contents.get(content_hash, {}).values() if list(c.header.token_ids) == list(tokens)]
        return next((c for c in reversed(same) if c.slot is not None), same[-1] if same else None)

    @staticmethod
    def _nearest(siblings: _Children, rest: bytes) -> tuple[Chunk, int]:
        """The sibling that shares most leading tokens with ``rest``: a neighbour of it in sorted order."""
        ordered = siblings.by_tokens
        i = ordered.bisect_left(rest)
        found: tuple[Chunk, int] | None = None
        for j in (i - 1, i):
            if 0 <= j < len(ordered):
                key, chunk = ordered.peekitem(j)
                shared = _common_tokens(key, rest)
                if found is None or shared > found[1]:
                    found = (chunk, shared)
        assert found is not None, "a parent without children is never kept"
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError unless all maps, and the summary, hold the same chunks."""
        listed = [c for s in self._children.values() for c in s.by_tokens.values()]
        assert len(listed) == len(self._chunks), "children and chunks differ in number"
        assert all(self._chunks.get(c.key) is c for c in listed), "a child is not in the index"
        contents = [c for same in self._contents.values() for c in same.values()]
        assert len(contents) == len(self._chunks), "contents and chunks differ in number"
        assert self.tokens == sum(len(c.header.token_ids) for c in listed), "tokens do not add up"
        if self.summary is not None:
            self.summary.check_integrity(listed)
