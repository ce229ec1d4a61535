"""Chunks between two engines of different layouts, through a real daemon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer import block_copier, chunk_writer
from kvsidecar.kv_transfer.block_copier import BlockCopier, slots_of
from kvsidecar.kv_transfer.chunk_reader import ChunkReader
from kvsidecar.kv_transfer.chunk_writer import ChunkWriter, StoreCancelled, StoredPrefix, StoreResult
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup
from kvsidecar.kv_transfer.session import Session
from kvsidecar.net.channel import ServiceAddress

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.cache_daemon.conftest import descriptor
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS, BLOCKS, apart, fill, geometry, packed

TOKENS = list(range(1000, 1000 + 4 * BLOCK_TOKENS))
CHUNK = 2 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    # Seldom: what is copied counts for two intervals from the last answered heartbeat, and a busy machine answers late.
    with Node(workers=0, arena_bytes="4MiB", daemon_flags={"heartbeat_ms": 20_000}) as running:
        yield running


class Engine:
    """An engine that is attached to a node on this host, or to a daemon's address."""

    nothing = StoredPrefix()

    def __init__(
        self,
        at: Node | ServiceAddress,
        name: str,
        bits: int = 16,
        *,
        transposed: bool = False,
        engine: str = "kvsidecar",
    ) -> None:
        dtype = torch.bfloat16
        self.cache, self.write = apart("bhct", dtype, bits) if transposed else packed(dtype, bits)
        described = descriptor(name, geometry(dtype, bits))
        described.quantizer_version = 0 if bits == 16 else keys.QUANTIZER_VERSION
        self.descriptor: NamespaceDescriptor = described
        self.link = DaemonConnection(
            at if isinstance(at, ServiceAddress) else ServiceAddress(at.cache_socket), name, described, engine=engine
        )
        assert self.link.wait(30)
        self.reader = ChunkReader(BlockCopier(self.cache), self.cache.geometry, 5.0)
        self.writer = ChunkWriter(BlockCopier(self.cache), self.cache.geometry, CHUNK, 5.0)

    @property
    def session(self) -> Session:
        assert self.link.wait(30)
        found = self.link.session
        assert found is not None
        return found

    def root(self, salt: bytes) -> bytes:
        return keys.tenant_root(self.link.namespace, salt)

    def store(
        self, blocks: list[int], tokens: list[int], prefix: StoredPrefix | None = None, salt: bytes = b""
    ) -> StoreResult:
        slots = slots_of(blocks, BLOCK_TOKENS)
        return self.writer.store(self.session, self.root(salt), tokens, salt, slots, prefix or StoredPrefix())

    def load(self, blocks: list[int], tokens: list[int], first: int = 0, salt: bytes = b"") -> int:
        return self.reader.load(self.session, tokens, salt, slots_of(blocks, BLOCK_TOKENS), first).tokens

    def payload(self, blocks: list[int]) -> bytes:
        g = self.cache.geometry
        header = new_header(
            Geometry(g.layers, g.kv_heads, g.head_dim, g.dtype, 16), [0] * len(blocks) * BLOCK_TOKENS, 0
        )
        out = memoryview(bytearray(header.payload_bytes))
        BlockCopier(self.cache).pack(slots_of(blocks, BLOCK_TOKENS), header, out)
        return bytes(out)


@contextlib.contextmanager
def engines(node: Node, name: str, bits: int = 16) -> Iterator[tuple[Engine, Engine]]:
    one, two = Engine(node, name, bits), Engine(node, name, bits, transposed=True)
    try:
        fill(one.write, torch.from_numpy(slots_of([0, 1, 2, 3], BLOCK_TOKENS)), torch.bfloat16)
        yield one, two
    finally:
        one.link.close()
        two.link.close()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_what_one_engine_stores_another_of_another_layout_has(node: Node, bits: int) -> None:
    with engines(node, f"both-{bits}", bits) as (one, two):
        outcome = one.store([2, 0, 3, 1], TOKENS)
        assert outcome.prefix.tokens == len(TOKENS)
        assert outcome.stored_chunks == 2
        assert two.load([4, 1, 0, 2], TOKENS) == len(TOKENS)
        here, there = (np.frombuffer(e.payload(b), np.uint16) for e, b in ((one, [2, 0, 3, 1]), (two, [4, 1, 0, 2])))
        if bits == 16:
            assert (here == there).all()
        else:
            exact, stored = (torch.from_numpy(x.copy()).view(torch.bfloat16).float() for x in (here, there))
            assert (exact - stored).abs().max() < (0.05 if bits == 8 else 0.6)
        # Stored again it is there already, and nothing is written.
        assert one.store([2, 0, 3, 1], TOKENS).stored_chunks == 0


def test_what_was_copied_while_the_process_hung_is_not_used(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may have ended the session, and given the pages to others."""
    with engines(node, "hung") as (one, two):
        one.store([0, 1, 2, 3], TOKENS)
        hung, unpack = two.session, two.reader._copier.unpack

        def slow(*arguments: object) -> None:
            unpack(*arguments)  # type: ignore[arg-type]
            hung.last_acked_at = time.monotonic() - 2.1 * hung.heartbeat_seconds

        monkeypatch.setattr(two.reader._copier, "unpack", slow)
        with pytest.raises(ConnectionError, match="session ended while chunks were copied"):
            two.load([0, 1, 2, 3], TOKENS)
        monkeypatch.setattr(two.reader._copier, "unpack", unpack)
        hung.suspect()  # a heartbeat goes at once
        until(lambda: hung.leases_valid)
        assert two.load([0, 1, 2, 3], TOKENS) == len(TOKENS)


def test_storing_goes_on_where_a_match_ended(node: Node) -> None:
    with engines(node, "goes on") as (one, two):
        first = one.store([0, 1], TOKENS[:CHUNK])
        outcome = one.store([0, 1, 2, 3], TOKENS, first.prefix)
        assert (outcome.prefix.tokens, outcome.stored_chunks) == (len(TOKENS), 1)
        found = PrefixLookup(one.cache.geometry, 5.0).match(two.session, TOKENS, b"")
        assert found.full_chunks == (len(TOKENS), outcome.prefix.prefix_hash)


def test_a_parent_that_is_gone_is_stored_again(node: Node) -> None:
    with engines(node, "gone") as (one, two):
        outcome = one.store([0, 1, 2, 3], TOKENS, StoredPrefix(CHUNK, b"x" * 32))
        assert outcome.prefix.tokens == len(TOKENS)
        assert two.load([0, 1, 2, 3], TOKENS) == len(TOKENS)


def test_only_what_is_wanted_is_touched(node: Node) -> None:
    """The engine has the first block and a half of its own; others may be reading it."""
    with engines(node, "wanted") as (one, two):
        one.store([0, 1, 2, 3], TOKENS)
        assert two.load([0, 1, 2, 3], TOKENS, first=12) == len(TOKENS)
        found, full_chunks = (
            np.frombuffer(e.payload([0, 1, 2, 3]), np.uint16).reshape(2, 3, 32, 2, 16) for e in (two, one)
        )
        assert not found[:, :, :12].any()
        assert (found[:, :, 12:] == full_chunks[:, :, 12:]).all()


def test_a_longer_prompt_gets_what_there_is(node: Node) -> None:
    with engines(node, "longer") as (one, two):
        one.store([0, 1], TOKENS[:CHUNK])
        assert two.load([0, 1, 2, 3], TOKENS) == CHUNK


def test_salts_share_nothing(node: Node) -> None:
    with engines(node, "salts") as (one, two):
        one.store([0, 1, 2, 3], TOKENS, salt=b"a")
        assert two.load([0, 1, 2, 3], TOKENS, salt=b"b") == 0
        assert two.load([0, 1, 2, 3], TOKENS, salt=b"a") == len(TOKENS)


def test_an_engine_that_wants_its_blocks_back_leaves_nothing_reserved(node: Node) -> None:
    with engines(node, "cancel") as (one, _):
        turns = 0

        @contextlib.contextmanager
        def read_guard() -> Iterator[None]:
            nonlocal turns
            turns += 1
            if turns == 2:
                raise StoreCancelled
            yield

        root = keys.tenant_root(one.link.namespace, b"")
        with pytest.raises(StoreCancelled):
            one.writer.store(
                one.session,
                root,
                TOKENS,
                b"",
                slots_of([0, 1, 2, 3], BLOCK_TOKENS),
                StoredPrefix(),
                read_guard=read_guard,
            )
        assert node.cache_stats().reservations == 0
        assert one.store([0, 1, 2, 3], TOKENS).stored_chunks == 2


def test_nothing_is_stored_behind_a_chunk_that_was_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody deletes the prompt while its second chunk is being written."""
    monkeypatch.setattr(chunk_writer, "_MAX_GROUP_CHUNKS", 1)
    with engines(node, "deleted") as (one, _):
        root, turns = keys.tenant_root(one.link.namespace, b""), 0

        @contextlib.contextmanager
        def read_guard() -> Iterator[None]:
            nonlocal turns
            turns += 1
            if turns == 2:
                stub = CacheServiceStub(node.cache_channel())
                stub.Delete(cache_pb2.DeleteRequest(prefix=cache_pb2.PrefixRef(root=root)))
            yield

        writer = ChunkWriter(BlockCopier(one.cache), one.cache.geometry, BLOCK_TOKENS, 5.0)
        slots = slots_of([0, 1, 2, 3], BLOCK_TOKENS)
        outcome = writer.store(one.session, root, TOKENS, b"", slots, StoredPrefix(), read_guard=read_guard)
        assert (outcome.stored_chunks, outcome.refused_chunks) == (1, 1)
        assert node.cache_stats().reservations == 0


def test_leases_are_given_back(node: Node) -> None:
    with engines(node, "leases") as (one, two):
        one.store([0, 1, 2, 3], TOKENS)
        two.load([0, 1, 2, 3], TOKENS)
        deadline = time.monotonic() + 30
        while node.cache_stats().leases:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_disk_is_not_waited_for_by_who_has_it_leased(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines(node, "patience") as (one, two):
        one.store([0, 1, 2, 3], TOKENS)
        stub, timeouts = two.session.stub, list[float]()
        real = stub.Match

        def watched(request: object, timeout: float) -> object:
            timeouts.append(timeout)
            return real(request, timeout=timeout)

        monkeypatch.setattr(stub, "Match", watched)
        slots = slots_of([0, 1, 2, 3], BLOCK_TOKENS)
        for leased in (True, False):
            assert two.reader.load(two.session, TOKENS, b"", slots, 0, leased=leased).tokens == len(TOKENS)
        assert timeouts[0] == 5.0 < timeouts[1]


@pytest.mark.parametrize("bits", [16, 8])
def test_slots_outside_of_the_cache_are_refused(bits: int) -> None:
    cache, _ = packed(torch.bfloat16, bits)
    copier, slots = BlockCopier(cache), slots_of([BLOCKS - 1, BLOCKS], BLOCK_TOKENS)
    header = new_header(cache.geometry, [0] * len(slots), 0)
    payload = memoryview(bytearray(header.payload_bytes))
    for copy in (copier.pack, copier.unpack):
        with pytest.raises(ValueError, match=r"slot 47 is outside of the cache, whose last one is 39"):
            copy(slots, header, payload)
        copy(slots[:BLOCK_TOKENS], new_header(cache.geometry, [0] * BLOCK_TOKENS, 0), payload)


def test_copies_on_a_gpu_wait_for_the_engines_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enqueued step may still write or read the blocks; the copier's stream is not the engine's."""
    copier, waited = BlockCopier(packed()[0]), list[Any]()
    copier._stream = SimpleNamespace(wait=waited.append, synchronize=lambda: None, active=contextlib.nullcontext)
    device = SimpleNamespace(guard=contextlib.nullcontext)
    monkeypatch.setattr(block_copier, "device_of", lambda name: device)
    header = new_header(copier.cache.geometry, list(range(BLOCK_TOKENS)), 0)
    payload = memoryview(bytearray(header.payload_bytes))
    copier.pack(slots_of([0], BLOCK_TOKENS), header, payload, after="its writes")
    copier.unpack(slots_of([0], BLOCK_TOKENS), header, payload.toreadonly(), after="its last use")
    assert waited == ["its writes", "its last use"]


def test_what_was_copied_in_a_session_that_may_have_ended_is_not_believed(node: Node) -> None:
    with engines(node, "doubt") as (one, two):
        one.store([0, 1, 2, 3], TOKENS)
        held = two.session
        held.heartbeat_seconds = 0.0  # as if it had been stopped for long
        with pytest.raises(ConnectionError, match="ended while chunks were copied"):
            two.reader.load(held, TOKENS, b"", slots_of([0, 1, 2, 3], BLOCK_TOKENS), 0)


def test_a_daemon_that_dies_costs_misses_and_comes_back() -> None:
    with (
        Node(workers=0, arena_bytes="4MiB", daemon_flags={"heartbeat_ms": 5000}) as node,
        engines(node, "dies") as (one, two),
    ):
        one.store([0, 1, 2, 3], TOKENS)
        held = two.session
        node.kill("daemon")
        with pytest.raises((grpc.RpcError, ConnectionError, ValueError)) as caught:
            two.reader.load(held, TOKENS, b"", slots_of([0, 1, 2, 3], BLOCK_TOKENS), 0)
        assert handle_failure(two.link, held, caught.value)
        node.start_daemon()
        assert two.session is not held
        assert one.store([0, 1, 2, 3], TOKENS).prefix.tokens == len(TOKENS)
        assert two.load([0, 1, 2, 3], TOKENS) == len(TOKENS)
