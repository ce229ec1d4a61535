"""A real daemon process, and a small client that speaks its protocol."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, ChunkHeader, NamespaceDescriptor
from kvsidecar.layout import Geometry, new_header
from kvsidecar.memory import map_arena, map_staging

from benchmarks.node import Node

GEOMETRY = Geometry(2, 1, 8, DATA_TYPE_FLOAT32, 16)


def descriptor(name: str = "m") -> NamespaceDescriptor:
    return NamespaceDescriptor(
        model_fingerprint=name.encode().ljust(32, b"\0"), architecture="Test", layers=2, kv_heads=1, head_dim=8,
        dtype=DATA_TYPE_FLOAT32, format_version=keys.FORMAT_VERSION, bits=16, tensor_parallel_size=1,
    )  # fmt: skip


class Peer:
    """A worker without a model: attaches, maps the daemon's memory, stores and reads chunks."""

    def __init__(self, node: Node, name: str = "m", heartbeats: bool = True) -> None:
        self.channel = node.cache_channel()
        self.stub: Any = CacheServiceStub(self.channel)
        self.descriptor = descriptor(name)
        self.namespace = keys.namespace_id(self.descriptor)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hello = pb.Hello(protocol_version=2, client_name="peer", descriptor=self.descriptor, namespace=self.namespace)
        self._out.put(pb.AttachRequest(hello=hello))
        self.call = self.stub.Attach(iter(self._out.get, None))
        self.welcome = next(self.call).welcome
        self.session = self.welcome.session_id
        self._beating = threading.Event()
        if heartbeats:
            threading.Thread(target=self._beat, daemon=True).start()
        self.arena, self.staging = map_arena(self.welcome), map_staging(self.welcome)

    def _beat(self) -> None:
        while not self._beating.wait(self.welcome.heartbeat_interval_ms / 2000):
            self._out.put(pb.AttachRequest(heartbeat=pb.Heartbeat()))

    def close(self) -> None:
        self._beating.set()
        self._out.put(None)
        self.call.cancel()
        self.channel.close()

    def view(self, match: pb.ChunkMatch) -> memoryview:
        return self.arena[match.offset : match.offset + match.payload_bytes]

    def staged(self, place: pb.StagingRef) -> memoryview:
        return self.staging[place.offset : place.offset + place.size_bytes]

    def header(self, ids: list[int], start: int = 0, parent: bytes = b"") -> ChunkHeader:
        header = new_header(GEOMETRY, ids, start)
        header.parent_prefix_hash = parent
        return header

    def reserve(self, *headers: ChunkHeader, salt: bytes = b"") -> list[pb.Reservation]:
        request = pb.ReserveRequest(session_id=self.session, headers=headers, tenant_salt=salt)
        return list(self.stub.Reserve(request).reservations)

    def commit(self, *reservations: pb.Reservation) -> pb.CommitResponse:
        items = [
            pb.CommitItem(reservation_id=r.reservation_id, checksum=keys.checksum(self.staged(r.staging)))
            for r in reservations
        ]
        return self.stub.Commit(pb.CommitRequest(session_id=self.session, epoch=self.welcome.epoch, items=items))

    def put(self, ids: list[int], start: int = 0, parent: bytes = b"", salt: bytes = b"") -> bytes:
        """Stores a chunk whose payload is determined by its tokens. Returns its prefix hash."""
        found = self.reserve(self.header(ids, start, parent), salt=salt)[0]
        assert found.outcome == pb.RESERVE_OUTCOME_GRANTED, found
        self.staged(found.staging)[:] = payload_of(ids, found.staging.size_bytes)
        assert self.commit(found).committed == 1
        return found.prefix_hash

    def match(self, ids: list[int], salt: bytes = b"") -> pb.MatchResponse:
        return self.stub.Match(pb.MatchRequest(session_id=self.session, token_ids=ids, tenant_salt=salt))

    def release(self, found: pb.MatchResponse) -> int:
        request = pb.ReleaseRequest(session_id=self.session, lease_ids=[found.lease_id])
        return self.stub.Release(request).released

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest())

    def read(self, ids: list[int], salt: bytes = b"") -> int:
        """Matches, checks every byte, releases. Returns the tokens found."""
        found = self.match(ids, salt)
        at = 0
        for m in found.matches:
            if m.matched_tokens == m.tokens:
                whole = payload_of(ids[at : at + m.matched_tokens], m.payload_bytes)
                assert self.view(m) == whole, "the bytes are not those of the chunk's tokens"
            at += m.matched_tokens
        assert self.release(found) == bool(found.matches)
        return found.matched_tokens


def payload_of(ids: list[int], size: int) -> bytes:
    seed = keys.token_bytes(ids)
    return (seed * (size // len(seed) + 1))[:size]


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    """Starts daemons without workers; they end with the test."""
    with ExitStack() as stack:

        def launch(**flags: Any) -> Node:
            arena = flags.pop("arena_bytes", "4MiB")
            return stack.enter_context(Node(workers=0, arena_bytes=arena, daemon_flags=flags))

        yield launch


@pytest.fixture
def daemon(start: Callable[..., Node]) -> Node:
    return start(heartbeat_ms=200)


@pytest.fixture
def peer(daemon: Node) -> Iterator[Peer]:
    found = Peer(daemon)
    yield found
    found.close()


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """The status and text that a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details() or ""


def store_file(node: Node) -> Path:
    return node.folder / "store" / "data.mdb"
