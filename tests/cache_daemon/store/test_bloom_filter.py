"""The Bloom filter: no false negatives after stores, removals and restarts."""

import mmap
import os
import random

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar import keys
from kvsidecar.bloom_filter import HEAD_TOKENS, BloomFilter
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.kv_transfer.mapped_memory import SUMMARY, map_summary, receive_descriptor

from benchmarks.node import Node
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store.bloom_filter import SUMMARY_BYTES, CountingBloomFilter
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.prefix_index import PrefixIndex
from cache_daemon.store.tenant_accounts import TenantAccount
from tests.cache_daemon.conftest import Peer, code_of

ROOT = b"r" * 32
TENANT = TenantAccount(b"t", TenantLimits())
few = st.integers(0, 1)
paths = st.lists(st.lists(st.lists(few, min_size=1, max_size=10), min_size=1, max_size=3), max_size=8)


def chunk_of(parent: bytes, ids: list[int]) -> Chunk:
    header = ChunkHeader(
        root=ROOT,
        parent_prefix_hash=parent,
        prefix_hash=keys.prefix_hash(parent, ids),
        content_hash=keys.content_hash(ROOT, ids),
    )
    return Chunk(header, keys.token_bytes(ids), TENANT)


@settings(max_examples=300)
@given(paths, st.randoms(), st.lists(few, max_size=20))
def test_what_can_be_matched_is_in_the_summary(
    stored: list[list[list[int]]], rng: random.Random, query: list[int]
) -> None:
    memory = memoryview(bytearray(32))
    index, summary = PrefixIndex(CountingBloomFilter(memory)), BloomFilter(memory)
    for path in stored:
        parent = ROOT
        for ids in path:
            chunk = chunk_of(parent, ids)
            if index.get(chunk.key) is None:
                index.add(chunk)
            parent = chunk.key
    for chunk in rng.sample(sorted(index, key=lambda c: c.key), len(index) // 2):
        if index.get(chunk.key) is not None:
            for gone in reversed(index.subtree(chunk)):
                index.remove(gone)
    index.check_integrity()
    found = index.match(ROOT, keys.token_bytes(query))
    whole = any(n == c.tokens for c, n in found)
    if whole or sum(n for _, n in found) >= HEAD_TOKENS or len(query) < HEAD_TOKENS:
        assert summary.may_contain_prefix(ROOT, query)
    for chunk in index:
        assert summary.may_contain_content(ROOT, list(memoryview(chunk.ids).cast("I")))
    for chunk in [c for c in index if c.header.parent_prefix_hash == ROOT]:
        for gone in reversed(index.subtree(chunk)):
            index.remove(gone)
    assert not any(memory), "everything is removed, and the summary is not empty"


def test_a_hundred_thousand_chunks_leave_it_sharp() -> None:
    memory = memoryview(bytearray(SUMMARY_BYTES))
    writer, summary, rng = CountingBloomFilter(memory), BloomFilter(memory), random.Random(3)
    for i in range(100_000):
        header = ChunkHeader(content_hash=rng.randbytes(32), root=ROOT, parent_prefix_hash=ROOT if i % 8 == 0 else b"p")
        ids = keys.token_bytes([rng.randrange(50_000) for _ in range(HEAD_TOKENS)])
        writer.add(Chunk(header, ids, TENANT))
    asked = [[rng.randrange(50_000) for _ in range(16)] for _ in range(3000)]
    assert sum(summary.may_contain_prefix(ROOT, tokens) for tokens in asked) <= 15


def test_a_bit_that_was_counted_to_the_end_stays() -> None:
    memory = memoryview(bytearray(8))
    writer, chunk = CountingBloomFilter(memory), chunk_of(ROOT, [1, 2, 3])
    for _ in range(70_000):
        writer.add(chunk)
    set_bits = bytes(memory)
    for _ in range(70_000):
        writer.remove(chunk)
    assert bytes(memory) == set_bits


def root(peer: Peer) -> bytes:
    return keys.tenant_root(peer.namespace, b"")


def mapped(peer: Peer) -> BloomFilter:
    return BloomFilter(map_summary(peer.welcome))


def test_a_daemon_publishes_what_it_stores(peer: Peer) -> None:
    summary, ids = mapped(peer), list(range(100, 120))
    assert not summary.may_contain_prefix(root(peer), ids)
    key = peer.put(ids)
    assert summary.may_contain_prefix(root(peer), [*ids[:HEAD_TOKENS], 7])
    assert summary.may_contain_content(root(peer), ids)
    assert not summary.may_contain_prefix(root(peer), [7, *ids])
    assert not summary.may_contain_prefix(keys.tenant_root(peer.namespace, b"another"), ids)
    peer.stub.Delete(pb.DeleteRequest(prefix=pb.PrefixRef(namespace=peer.namespace, prefix_hash=key)))
    assert not summary.may_contain_prefix(root(peer), ids)


def test_a_daemon_that_starts_again_publishes_what_it_loads(daemon: Node) -> None:
    ids = list(range(50))
    before = Peer(daemon)
    before.put(ids)
    daemon.settle()
    before.close()
    daemon.restart_daemon()
    after = Peer(daemon)
    assert mapped(after).may_contain_prefix(root(after), ids)
    assert after.read(ids) == len(ids)
    after.close()


def test_nobody_can_write_to_it(daemon: Node) -> None:
    peer = Peer(daemon)
    handle = receive_descriptor(peer.welcome, SUMMARY)
    try:
        assert os.fstat(handle).st_size == peer.welcome.summary.size_bytes == SUMMARY_BYTES
        with pytest.raises(PermissionError):
            mmap.mmap(handle, SUMMARY_BYTES)
        with pytest.raises(PermissionError):
            os.pwrite(handle, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)
        peer.close()


def test_lookups_that_were_not_needed_are_counted(daemon: Node) -> None:
    peer = Peer(daemon, heartbeats=False)
    for matches, tokens in ((2, 300), (5, 900), (5, 900)):
        beat = pb.Heartbeat(skipped_matches=matches, skipped_tokens=tokens)
        peer._out.put(pb.AttachRequest(heartbeat=beat))
        next(peer.call)
    assert (peer.stats().matches, peer.stats().requested_tokens) == (5, 900)
    peer.close()


def test_counts_that_cannot_be_end_the_session_and_nothing_else(daemon: Node, peer: Peer) -> None:
    liar = Peer(daemon, heartbeats=False)
    liar._out.put(pb.AttachRequest(heartbeat=pb.Heartbeat(skipped_matches=2**64 - 1)))
    code, text = code_of(lambda: next(liar.call))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "18446744073709551615" in text
    liar.close()
    peer.put([1, 2, 3])
    assert peer.read([1, 2, 3]) == 3
