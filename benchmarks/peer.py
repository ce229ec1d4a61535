"""Client of the daemon without a model: it attaches, maps memory, stores and reads chunks.

The payload of a chunk is a function of its tokens, so that every reader can check every byte.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, ChunkHeader, NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry, new_header
from kvsidecar.kv_transfer.mapped_memory import map_arena, map_staging

from benchmarks.node import Node

GEOMETRY = Geometry(2, 1, 8, DATA_TYPE_FLOAT32, 16)


def descriptor(name: str = "m", geometry: Geometry = GEOMETRY) -> NamespaceDescriptor:
    """Return a namespace descriptor of float32 chunks."""
    return NamespaceDescriptor(
        model_fingerprint=name.encode().ljust(32, b"\0"), architecture="Test", layers=geometry.layers,
        kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype=geometry.dtype,
        format_version=keys.FORMAT_VERSION, bits=geometry.bits, tensor_parallel_size=1,
    )  # fmt: skip


def payload_of(ids: list[int], size: int) -> bytes:
    """Return the payload of a chunk with these tokens."""
    seed = keys.token_bytes(ids)
    return (seed * (size // len(seed) + 1))[:size]


class Peer:
    """A client with one session. The methods raise grpc.RpcError or OSError if the daemon is down."""

    def __init__(
        self, node: Node, name: str = "m", heartbeats: bool = True, geometry: Geometry = GEOMETRY, timeout: float = 30.0
    ) -> None:
        self.channel = node.cache_channel()
        self.stub: Any = CacheServiceStub(self.channel)
        self.geometry, self.timeout = geometry, timeout
        self.descriptor = descriptor(name, geometry)
        self.namespace = keys.namespace_id(self.descriptor)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hello = pb.Hello(protocol_version=2, client_name="peer", descriptor=self.descriptor, namespace=self.namespace)
        self._out.put(pb.AttachRequest(hello=hello))
        self.call = self.stub.Attach(iter(self._out.get, None))
        self._beating = threading.Event()
        try:
            self.welcome = next(self.call).welcome
            self.session = self.welcome.session_id
            if heartbeats:
                threading.Thread(target=self._beat, daemon=True).start()
            self.arena, self.staging = map_arena(self.welcome), map_staging(self.welcome)
        except BaseException:
            self.close()
            raise

    def _beat(self) -> None:
        while not self._beating.wait(self.welcome.heartbeat_interval_ms / 2000):
            self._out.put(pb.AttachRequest(heartbeat=pb.Heartbeat()))

    def close(self) -> None:
        """Drop the connection without ending the session, as a dying worker does."""
        self._beating.set()
        self._out.put(None)
        self.call.cancel()
        self.channel.close()

    # ---- memory ---------------------------------------------------------------------------------------------

    def view(self, match: pb.ChunkMatch) -> memoryview:
        return self.arena[match.offset : match.offset + match.payload_bytes]

    def staged(self, place: pb.StagingRef) -> memoryview:
        return self.staging[place.offset : place.offset + place.size_bytes]

    # ---- writing --------------------------------------------------------------------------------------------

    def header(self, ids: list[int], start: int = 0, parent: bytes = b"") -> ChunkHeader:
        header = new_header(self.geometry, ids, start)
        header.parent_prefix_hash = parent
        return header

    def reserve(self, *headers: ChunkHeader, salt: bytes = b"", ttl: int = 0) -> list[pb.Reservation]:
        request = pb.ReserveRequest(session_id=self.session, headers=headers, tenant_salt=salt, ttl_seconds=ttl)
        return list(self.stub.Reserve(request, timeout=self.timeout).reservations)

    def commit(self, *reservations: pb.Reservation) -> pb.CommitResponse:
        items = [
            pb.CommitItem(reservation_id=r.reservation_id, checksum=keys.checksum(self.staged(r.staging)))
            for r in reservations
        ]
        request = pb.CommitRequest(session_id=self.session, epoch=self.welcome.epoch, items=items)
        return self.stub.Commit(request, timeout=self.timeout)

    def put(self, ids: list[int], start: int = 0, parent: bytes = b"", salt: bytes = b"", ttl: int = 0) -> bytes:
        """Store a chunk with a TTL in seconds (0: no expiry); return its prefix hash."""
        found = self.reserve(self.header(ids, start, parent), salt=salt, ttl=ttl)[0]
        assert found.outcome == pb.RESERVE_OUTCOME_GRANTED, found
        self.staged(found.staging)[:] = payload_of(ids, found.staging.size_bytes)
        assert self.commit(found).committed == 1
        return found.prefix_hash

    def try_put(self, ids: list[int], tokens_of_a_chunk: int, salt: bytes = b"") -> int:
        """Store the missing chunks of a prompt as a worker does; return the number of committed chunks.

        Skips chunks that the daemon refuses.
        """
        found = self.stub.Match(
            pb.MatchRequest(namespace=self.namespace, token_ids=ids, tenant_salt=salt), timeout=self.timeout
        )
        whole = [m for m in found.matches if m.matched_tokens == m.tokens]
        at = sum(m.matched_tokens for m in whole)
        parent = whole[-1].prefix_hash if whole else keys.tenant_root(self.namespace, salt)
        headers, cuts = [], []
        for begin in range(at, len(ids), tokens_of_a_chunk):
            cut = ids[begin : begin + tokens_of_a_chunk]
            headers.append(self.header(cut, begin, parent))
            parent = keys.prefix_hash(parent, cut)
            cuts.append(cut)
        if not headers:
            return 0
        granted = []
        for cut, one in zip(cuts, self.reserve(*headers, salt=salt), strict=True):
            if one.outcome == pb.RESERVE_OUTCOME_GRANTED:
                self.staged(one.staging)[:] = payload_of(cut, one.staging.size_bytes)
                granted.append(one)
        return int(self.commit(*granted).committed) if granted else 0

    # ---- reading --------------------------------------------------------------------------------------------

    def match(self, ids: list[int], salt: bytes = b"") -> pb.MatchResponse:
        request = pb.MatchRequest(session_id=self.session, token_ids=ids, tenant_salt=salt)
        return self.stub.Match(request, timeout=self.timeout)

    def release(self, *found: pb.MatchResponse) -> int:
        leases = [f.lease_id for f in found if f.lease_id]
        request = pb.ReleaseRequest(session_id=self.session, lease_ids=leases)
        return int(self.stub.Release(request, timeout=self.timeout).released)

    def release_later(self, found: pb.MatchResponse) -> Any:
        """Start to release a lease; return the call, whose ``result()`` waits for the answer."""
        request = pb.ReleaseRequest(session_id=self.session, lease_ids=[found.lease_id])
        return self.stub.Release.future(request, timeout=self.timeout)

    def is_right(self, ids: list[int], found: pb.MatchResponse) -> bool:
        """Return True if the bytes of all matched chunks belong to the chunks' tokens.

        The caller does not know all tokens of a partly matched chunk, so only its first bytes are checked.
        """
        at = 0
        for m in found.matches:
            size = m.payload_bytes
            if m.matched_tokens == m.tokens:
                expected = payload_of(ids[at : at + m.matched_tokens], size)
                if self.view(m) != expected:
                    return False
            elif self.view(m)[: m.matched_tokens * keys.TOKEN_BYTES] != keys.token_bytes(
                ids[at : at + m.matched_tokens]
            ):
                return False
            at += m.matched_tokens
        return True

    def read(self, ids: list[int], salt: bytes = b"") -> int:
        """Match a prompt, check every byte, and release the lease; return the number of matched tokens."""
        found = self.match(ids, salt)
        assert self.is_right(ids, found), "the bytes are not those of the chunk's tokens"
        assert self.release(found) == bool(found.matches)
        return int(found.matched_tokens)

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest(), timeout=self.timeout)

    def list_all(self) -> list[pb.ChunkInfo]:
        """Return all chunks of all tenants."""
        found: list[pb.ChunkInfo] = []
        token = b""
        while True:
            page = self.stub.List(pb.ListRequest(page_size=1000, page_token=token), timeout=self.timeout)
            found += page.chunks
            token = page.next_page_token
            if not token:
                return found
