"""Blocks of a worker's pool, stored in a real daemon and loaded from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any, cast

import pytest
import torch
from kvsidecar import keys
from kvsidecar.bloom_filter import HEAD_TOKENS
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS
from kvsidecar.errors import UnknownModel
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.context_reuse.chunking import FixedChunker
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client import chunk_saver
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.forward_batch import SequenceSlice, build_batch
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import LoadResult
from inference_svc.sequence.sequence import Sequence
from inference_svc.server.idle_verification import IdleVerification
from tests.cache_daemon.conftest import descriptor
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request
from tests.kvsidecar.kv_transfer.caches import DIM, HEADS, LAYERS, geometry


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="32MiB") as running:
        yield running


@contextlib.contextmanager
def connected(node: Node, name: str, chunk_tokens: int) -> Iterator[tuple[DaemonConnector, DaemonConnection]]:
    shape = geometry(torch.float32)
    link = DaemonConnection(ServiceAddress(node.cache_socket), name, descriptor(name, shape))
    connector = DaemonConnector({b"": link}, shape, ReusePolicy(FixedChunker(chunk_tokens), None, None, None), 0.1, 5.0)
    assert link.wait(60)
    try:
        yield connector, link
    finally:
        connector.close()


def random_pool(tokens: int) -> KVPool:
    pool = KVPool(LAYERS, HEADS, DIM, tokens, torch.float32, torch.device("cpu"))
    pool.keys.normal_()
    pool.values.normal_()
    return pool


def computed(pool: KVPool, ids: list[int], tokens: int) -> Sequence:
    """A sequence whose first ``tokens`` tokens are in the pool."""
    sequence, table = Request(ids, 5).sequence, pool.allocate(len(ids))
    assert table is not None
    sequence.kv.load(tokens, table, None)
    return sequence


def slots_of(sequence: Sequence) -> torch.Tensor:
    """Slots of all tokens but the last, which no load brings."""
    assert sequence.kv.table is not None
    return torch.from_numpy(sequence.kv.table.slots(0, len(sequence.tokens) - 1))


def store(connector: DaemonConnector, sequence: Sequence, pool: KVPool) -> StoredPrefix | None:
    done: Future[StoredPrefix | None] = Future()
    assert connector.save(sequence, pool, lambda _, stored: done.set_result(stored))
    return done.result(30)


def test_a_chunk_longer_than_the_daemon_takes_is_stored_in_pieces(node: Node) -> None:
    ids, pool = prompt(1, MAX_CHUNK_TOKENS + 100), random_pool(MAX_CHUNK_TOKENS + 256)
    with connected(node, "long", 2 * MAX_CHUNK_TOKENS) as (connector, link):
        stored = store(connector, computed(pool, ids, len(ids)), pool)
        assert stored is not None
        assert stored.tokens == len(ids)
        chunks = CacheServiceStub(node.cache_channel()).List(cache_pb2.ListRequest(page_size=1000)).chunks
        root = keys.tenant_root(link.namespace, b"")
        assert sorted(chunk.tokens for chunk in chunks if chunk.root == root) == [100, MAX_CHUNK_TOKENS]


def test_loading_leaves_what_is_in_the_pool(node: Node) -> None:
    """The first chunk begins with tokens that the sequence shares with others."""
    ids, there, shared = prompt(2, 200), random_pool(256), 20
    with connected(node, "shared", 64) as (connector, link):
        first = computed(there, ids, len(ids))
        assert store(connector, first, there) is not None
        session, deadline = link.session, time.monotonic() + 10
        assert session is not None
        while not session.may_contain(keys.tenant_root(link.namespace, b""), ids):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        here = random_pool(256)
        second = computed(here, ids, shared)
        source, target = slots_of(first), slots_of(second)
        before = here.keys[:, :, target]
        done: Future[LoadResult] = Future()
        assert connector.load(second, here, lambda _, result: done.set_result(result))
        assert done.result(30).tokens == 199
        after = here.keys[:, :, target]
        assert torch.equal(after[:, :, :shared], before[:, :, :shared])
        assert torch.equal(after[:, :, shared:], there.keys[:, :, source][:, :, shared:])


def test_a_corrupt_chunk_leaves_the_slots_finite_that_attention_reads(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk's first tokens are in the pool already. Torch's attention reads behind the pool's last block."""
    ids, there, pack = prompt(6, 200), random_pool(256), chunk_saver.pack_chunk

    def spoil(keys: Any, values: Any, slots: Any, header: Any, payload: memoryview) -> None:
        pack(keys, values, slots, header, payload)
        payload[:] = b"\xff" * len(payload)

    monkeypatch.setattr(chunk_saver, "pack_chunk", spoil)
    with connected(node, "corrupt", 64) as (connector, _):
        assert store(connector, computed(there, ids, len(ids)), there) is not None
        here, done = random_pool(256), Future[LoadResult]()
        second = computed(here, ids, 20)
        while not connector.load(second, here, lambda _, result: done.set_result(result)):
            time.sleep(0.02)
        assert done.result(30).tokens == 199
        assert here.keys[:, :, slots_of(second)[20:]].isnan().all()
        end = max(
            segment.first_slot + segment.padded
            for first in range(here.pages)
            for keys_seen in range(1, here.padding_slot - first * PAGE_TOKENS + 1)
            for one in [SequenceSlice([5], keys_seen - 1, BlockTable([(first, here.pages - first)]), True)]
            for segment in build_batch([one], here, here.keys.device).segments
            if segment.first_slot is not None
        )
        assert end > here.padding_slot
        assert here.keys[:, :, here.padding_slot : end].isfinite().all()
        assert here.values[:, :, here.padding_slot : end].isfinite().all()


def test_a_verdict_is_stored_once_the_daemon_answers_again() -> None:
    """It was dropped if the daemon did not answer at the end of the verification, which takes minutes."""
    verdict, unused = cache_pb2.ReuseVerdict(passed=True, strategy="guided", ratio=0.15), cast(Any, None)
    with Node(workers=0, arena_bytes="4MiB") as node, connected(node, "verdict", 64) as (connector, link):
        node.kill("daemon")
        idle = IdleVerification(unused, connector, unused)
        with ThreadPoolExecutor(1) as thread:
            stored = thread.submit(idle._store, verdict)
            try:
                time.sleep(1.0)
                assert not stored.done()
                node.start_daemon()
                stored.result(60)
            finally:
                idle.close()
        other = DaemonConnection(ServiceAddress(node.cache_socket), "other", link.descriptor)
        try:
            assert other.wait(60)
            assert other.session is not None
            assert other.session.verdict == verdict
        finally:
            other.close()


def test_a_verdict_that_the_daemon_refuses_is_not_sent_again(node: Node) -> None:
    with connected(node, "refused", 64) as (connector, _):
        assert connector.store_verdict(cache_pb2.ReuseVerdict(passed=True, strategy="guided", ratio=2.0))


def test_a_session_of_an_unloaded_adapter_is_not_released(node: Node) -> None:
    """The adapter may be unloaded after the worker has found it for the request."""
    with connected(node, "unloaded", 64) as (connector, _):
        assert connector.release_session(b"", b"", "agent") == 0
        with pytest.raises(UnknownModel, match="the adapter has been unloaded"):
            connector.release_session(b"a", b"", "agent")


@pytest.mark.parametrize("other", [b"one tenant", b"another tenant"])
def test_a_load_waits_for_saves_of_its_tenant_only(node: Node, monkeypatch: pytest.MonkeyPatch, other: bytes) -> None:
    """Chat templates give the prompts of all tenants the same first tokens."""
    saving, go_on, template, pool = Event(), Event(), prompt(3, HEAD_TOKENS), random_pool(512)
    stored, loaded = computed(pool, template + prompt(4, 100), 100), computed(pool, template + prompt(5, 100), 0)
    for sequence, salt in ((stored, b"one tenant"), (loaded, other)):
        sequence.request = replace(sequence.request, cache=CacheParams(tenant_salt=salt))
    with connected(node, "tenants", 64) as (connector, _):
        save = connector._saver.save

        def blocked(*given: Any) -> StoredPrefix:
            saving.set()
            go_on.wait(30)
            return save(*given)

        monkeypatch.setattr(connector._saver, "save", blocked)
        assert connector.save(stored, pool, lambda *_: None)
        try:
            assert saving.wait(30)
            assert connector.load(loaded, pool, lambda *_: None) == (other == b"one tenant")
        finally:
            go_on.set()
