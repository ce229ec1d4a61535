"""LMCache's L2 objects in the daemon: opaque bytes, locked by leases.

LMCache chooses an object's layout, compression and encryption, so the daemon stores opaque bytes. The daemon sees an
object as a chunk with one layer, one head and ``TOKEN_BYTES`` per token. The chunk has as many tokens as the object's
size needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16
from kvsidecar.chunk_layout import MAX_MATCH_TOKENS, MAX_PROBES, Geometry
from kvsidecar.errors import ChunkNotFound, StoreUnavailable, from_rpc
from kvsidecar.kv_transfer.chunk_writer import WriteResult
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.error_policy import handle_failure
from kvsidecar.kv_transfer.named_pages import NAME_TOKENS, LeasedPages, NamedPage, NamedPages
from kvsidecar.kv_transfer.prefix_lookup import header_of
from kvsidecar.kv_transfer.session import CompletedLoad, Session

log = logging.getLogger(__name__)

TOKEN_BYTES = 32 << 10
# Half of a token's bytes are keys, and half are values. Each key or value has 2 bytes.
GEOMETRY = Geometry(1, 1, TOKEN_BYTES // 4, DATA_TYPE_BFLOAT16, 16)
_DELETE_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectName:
    """An object's name within its tenant."""

    salt: bytes
    name: bytes


@dataclass(eq=False)
class _ObjectLease:
    """The lease of one lookup, its objects that are still locked, and the chunks that were loaded under it."""

    held: LeasedPages
    pages: dict[ObjectName, pb.ChunkMatch] = field(default_factory=dict)
    seconds: float = 0.0  # duration of the lookup and the copies
    loaded: dict[bytes, pb.ChunkMatch] = field(default_factory=dict)  # by hash: an object counts once

    def completed(self) -> CompletedLoad | None:
        """Return the load for the daemon's metrics, or None without one. A token stands for ``TOKEN_BYTES`` bytes."""
        if not self.loaded:
            return None
        chunks = self.loaded.values()
        return CompletedLoad(sum(c.tokens for c in chunks), sum(c.payload_bytes for c in chunks), self.seconds)


class L2ObjectStore:
    """Stores, locks and loads objects. Thread-safe.

    If the daemon is unavailable, hangs or misbehaves, the methods do not raise: objects then count as missing.
    """

    def __init__(self, connection: DaemonConnection, timeout: float) -> None:
        self._connection, self._pages = connection, NamedPages.of(connection.namespace, GEOMETRY, timeout)
        self._lock = threading.Lock()
        self._locks: dict[ObjectName, deque[_ObjectLease]] = defaultdict(deque)

    @property
    def attached(self) -> bool:
        return self._connection.session is not None

    def close(self) -> None:
        self._connection.close()

    def store(self, names: Sequence[ObjectName], objects: Sequence[memoryview]) -> WriteResult:
        """Store objects; skips those that exceed the maximum chunk size."""
        there, fresh = [False] * len(names), [False] * len(names)

        def of_tenant(session: Session, salt: bytes, these: list[int]) -> None:
            these = [i for i in these if tokens_of(len(objects[i])) <= session.max_chunk_tokens]
            pages = [_page(names[i], len(objects[i])) for i in these]

            def fill(at: int, payload: memoryview) -> None:
                source = objects[these[at]]
                _copy(source, payload)
                payload[len(source) :] = bytes(len(payload) - len(source))

            written = self._pages.store(session, pages, salt, fill)
            for i, is_there, is_fresh in zip(these, written.stored, written.newly_stored, strict=True):
                there[i], fresh[i] = is_there, is_fresh

        self._by_tenant("storing", names, list(map(len, objects)), of_tenant)
        return WriteResult(tuple(there), tuple(fresh))

    def lock(self, names: Sequence[ObjectName], sizes: Sequence[int]) -> list[bool]:
        """Lock the stored objects among these names; return for each name whether it was found.

        ``sizes`` are the objects' sizes in bytes. An object that was locked several times stays locked until it is
        unlocked as many times.
        """
        done = [False] * len(names)

        def of_tenant(session: Session, salt: bytes, these: list[int]) -> None:
            began = time.perf_counter()
            held = self._find(session, names, sizes, these)
            if held is None:
                return
            matches = {names[these[at]]: match for at, match in held.pages.items()}
            lease = _ObjectLease(held, matches, time.perf_counter() - began)
            if not lease.pages:
                self._pages.release(held)
            with self._lock:
                for name in lease.pages:
                    self._locks[name].append(lease)
            for at in held.pages:
                done[these[at]] = True

        self._by_tenant("looking up", names, sizes, of_tenant)
        return done

    def unlock(self, names: Sequence[ObjectName]) -> None:
        """Unlock objects; ignores objects that are not locked."""
        for name in names:
            with self._lock:
                leases = self._locks.get(name)
                if not leases:
                    continue
                lease = leases.popleft()
                if not leases:
                    del self._locks[name]
                del lease.pages[name]
                last = not lease.pages
            if last:
                self._pages.release(lease.held, lease.completed())

    def load(self, names: Sequence[ObjectName], targets: Sequence[memoryview]) -> list[bool]:
        """Copy objects into buffers of exactly their sizes; return for each buffer whether it was filled.

        The contents of an unfilled buffer are undefined.
        """
        done = [False] * len(names)

        def of_tenant(session: Session, salt: bytes, these: list[int]) -> None:
            began = time.perf_counter()
            locked = {i: found for i in these if (found := self._locked(session, names[i])) is not None}
            absent = [i for i in these if i not in locked]
            held = self._find(session, names, [len(target) for target in targets], absent) if absent else None
            under: dict[_ObjectLease, dict[int, pb.ChunkMatch]] = defaultdict(dict)
            for i, (lease, match) in locked.items():
                under[lease][i] = match
            own = None if held is None else _ObjectLease(held)
            if own is not None:
                under[own] = {absent[at]: match for at, match in own.held.pages.items()}
            try:
                copied = {lease: self._copied(lease.held, matches, targets) for lease, matches in under.items()}
                if not session.leases_valid:
                    raise ConnectionError("the session ended while objects were copied")
                seconds = time.perf_counter() - began
                with self._lock:
                    for lease, good in copied.items():
                        lease.seconds += seconds / len(copied)
                        lease.loaded |= {under[lease][i].prefix_hash: under[lease][i] for i in good}
                for i in (i for good in copied.values() for i in good):
                    done[i] = True
            finally:
                if own is not None:
                    self._pages.release(own.held, own.completed())

        self._by_tenant("loading", names, list(map(len, targets)), of_tenant)
        return done

    def delete(self, names: Sequence[ObjectName], sizes: Sequence[int]) -> list[bool]:
        """Delete objects; return for each object whether it existed. ``sizes`` are the objects' sizes in bytes.

        The daemon frees a locked object only after its last lock ends.
        """
        done = [False] * len(names)

        def of_tenant(session: Session, salt: bytes, these: list[int]) -> None:
            held = self._find(session, names, sizes, these)
            if held is None:
                return
            self._pages.release(held)
            for at, match in held.pages.items():
                prefix = pb.PrefixRef(
                    namespace=self._connection.namespace, tenant_salt=salt, prefix_hash=match.prefix_hash
                )
                try:
                    session.stub.Delete(pb.DeleteRequest(prefix=prefix), timeout=_DELETE_SECONDS)
                except grpc.RpcError as error:
                    failed = from_rpc(error)
                    if isinstance(failed, ChunkNotFound):
                        continue  # another client deleted it first
                    if not isinstance(failed, StoreUnavailable):  # deleted, but not from disk yet
                        raise
                done[these[at]] = True

        self._by_tenant("deleting", names, sizes, of_tenant)
        return done

    def _copied(self, held: LeasedPages, matches: dict[int, pb.ChunkMatch], targets: Sequence[memoryview]) -> list[int]:
        """Copy the objects whose size equals the size of their target; return the indices of these objects."""
        good = []
        for i, match in matches.items():
            header_of(match, GEOMETRY)
            if match.tokens == tokens_of(len(targets[i])):
                good.append(i)
        with closing(self._pages.read(held, [matches[i] for i in good])) as payloads:
            for i, payload in zip(good, payloads, strict=True):
                assert isinstance(payload, memoryview), "it has no GPU"
                _copy(payload[: len(targets[i])], targets[i])
        return good

    def _locked(self, session: Session, name: ObjectName) -> tuple[_ObjectLease, pb.ChunkMatch] | None:
        """Return the lease and the chunk of an object that is locked in this session; None if it is not locked."""
        with self._lock:
            for lease in self._locks.get(name, ()):
                if lease.held.found.session is session:
                    return lease, lease.pages[name]
        return None

    def _find(
        self, session: Session, names: Sequence[ObjectName], sizes: Sequence[int], these: list[int]
    ) -> LeasedPages | None:
        pages = [_page(names[i], sizes[i]) for i in these]
        return self._pages.find(session, pages, names[these[0]].salt)

    def _by_tenant(
        self,
        what: str,
        names: Sequence[ObjectName],
        sizes: Sequence[int],
        work: Callable[[Session, bytes, list[int]], Any],
    ) -> None:
        """Run ``work`` for the objects of each tenant, in groups that fit into one lookup.

        A failed call is logged, and its objects count as missing.
        """
        # As within a lookup, the last objects come first: a prompt's first objects count as used last.
        for salt, these in reversed(_lookups(names, sizes)):
            session = self._connection.session
            if session is None:
                return
            try:
                work(session, salt, these)
            except Exception as error:
                log.warning("%s objects failed: %s", what, handle_failure(self._connection, session, error))


def tokens_of(size_bytes: int) -> int:
    """Return the number of tokens in an object's chunk, which must be enough for the object's name, too."""
    return max(NAME_TOKENS, -(-size_bytes // TOKEN_BYTES))


def _lookups(names: Sequence[ObjectName], sizes: Sequence[int]) -> list[tuple[bytes, list[int]]]:
    """Divide objects into lookups that the daemon accepts: each has a salt, and the indices of its objects."""
    found, latest = list[tuple[bytes, list[int]]](), dict[bytes, tuple[list[int], int]]()
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        these, tokens = latest.get(name.salt, ([], 0))
        tokens += tokens_of(size)
        if not these or len(these) == MAX_PROBES or tokens > MAX_MATCH_TOKENS:
            these, tokens = [], tokens_of(size)
            found.append((name.salt, these))
        these.append(i)
        latest[name.salt] = these, tokens
    return found


def _page(name: ObjectName, size_bytes: int) -> NamedPage:
    return NamedPage(name.name, tokens_of(size_bytes))


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy into the first bytes of the target with NumPy, which releases the GIL."""
    np.frombuffer(target, np.uint8)[: len(source)] = np.frombuffer(source, np.uint8)
