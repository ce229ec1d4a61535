"""The prefix index against an exhaustive search."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.tenant_accounts import TenantAccount

ROOT = b"r" * 32
TENANT = TenantAccount(b"t", TenantLimits())
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)


def put(index: PrefixIndex, parent: bytes, ids: list[int]) -> bytes:
    key = keys.prefix_hash(parent, ids)
    if index.get(key) is None:
        header = ChunkHeader(root=ROOT, parent_prefix_hash=parent, prefix_hash=key)
        index.add(Chunk(header, keys.token_bytes(ids), TENANT))
    return key


def brute_force(index: PrefixIndex, parent: bytes, query: list[int]) -> int:
    best = 0
    for child in index.children(parent):
        ids = list(memoryview(child.ids).cast("I"))
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, query, strict=False)) if a != b), min(len(ids), len(query))
        )
        if shared == len(ids):
            shared += brute_force(index, child.key, query[shared:])
        best = max(best, shared)
    return best


@settings(max_examples=300)
@given(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=12), st.lists(st.integers(0, 2), max_size=14))
def test_match_is_the_longest_stored_prefix(paths: list[list[list[int]]], query: list[int]) -> None:
    index = PrefixIndex()
    for path in paths:
        parent = ROOT
        for ids in path:
            parent = put(index, parent, ids)
    found = index.match(ROOT, keys.token_bytes(query))
    assert sum(n for _, n in found) == brute_force(index, ROOT, query)
    at, parent = 0, ROOT
    for i, (chunk, n) in enumerate(found):
        assert chunk.header.parent_prefix_hash == parent
        assert chunk.ids[: 4 * n] == keys.token_bytes(query[at : at + n])
        assert n == chunk.tokens or i == len(found) - 1
        at, parent = at + n, chunk.key
    index.check_integrity()


@given(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=10), st.randoms())
def test_removing_leaves_nothing_behind(paths: list[list[list[int]]], random: object) -> None:
    index = PrefixIndex()
    for path in paths:
        parent = ROOT
        for ids in path:
            parent = put(index, parent, ids)
    while len(index):
        leaf = next(c for c in index if not index.has_children(c))
        index.remove(leaf)
        index.check_integrity()
    assert index.match(ROOT, keys.token_bytes([0, 1])) == []
    assert index.tokens == 0


def test_superseded_are_childless_proper_prefixes() -> None:
    index = PrefixIndex()
    tail, parent = put(index, ROOT, [1, 2]), put(index, ROOT, [1])
    put(index, parent, [5])
    longer = put(index, ROOT, [1, 2, 3])
    chunk = index.get(longer)
    assert chunk is not None
    assert [c.key for c in index.superseded_by(chunk)] == [tail]


def test_a_large_fan_out_is_searched_by_bisection() -> None:
    index = PrefixIndex()
    for i in range(5000):
        put(index, ROOT, [7, i, i])
    assert [n for _, n in index.match(ROOT, keys.token_bytes([7, 4321, 0]))] == [2]


@pytest.mark.parametrize("query", [[], [9]])
def test_nothing_stored_matches_nothing(query: list[int]) -> None:
    assert PrefixIndex().match(ROOT, keys.token_bytes(query)) == []


def test_a_content_hash_alone_is_not_trusted() -> None:
    """Two texts with one hash, which SHA-256 will not give us: the index is told so."""
    index = PrefixIndex()
    key = put(index, ROOT, [1, 2])
    shared = b""  # as all headers of this file have it
    found = index.contents.find(shared, keys.token_bytes([1, 2]))
    assert found is not None
    assert found.key == key
    assert index.contents.find(shared, keys.token_bytes([2, 1])) is None
