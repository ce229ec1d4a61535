"""Loads stored prefixes into an engine's blocks: match, copy, release."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, NamedTuple

from kvkernels.paged_gather import Integers

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import Geometry
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup, header_of
from kvsidecar.kv_transfer.session import CompletedLoad, Session


class LoadedPrefix(NamedTuple):
    """Leading tokens that are in the cache after a load, and the payload bytes that the load copied."""

    tokens: int
    payload_bytes: int


class ChunkReader:
    """Copies stored prefixes into a paged KV cache. For one thread."""

    def __init__(self, copier: BlockCopier, geometry: Geometry, timeout: float) -> None:
        self._copier, self._geometry, self._timeout = copier, geometry, timeout
        self._lookup = PrefixLookup(geometry, timeout)

    def load(
        self,
        session: Session,
        tokens: list[int],
        salt: bytes,
        slots: Integers,
        first: int,
        *,
        leased: bool = False,
        after: Any = None,
        hints: CacheHints = NO_HINTS,
    ) -> LoadedPrefix:
        """Copy the stored part of ``tokens[first:]`` to ``slots [len(tokens)]``.

        Ignores the slots before ``first``. ``leased`` says that another session already leases all of these chunks.
        ``after`` is the CUDA event that the engine recorded after it enqueued its last use of these slots.

        Raises grpc.RpcError and ValueError. Raises ConnectionError when the lease may have expired during the copy.
        After an error, the blocks' contents are undefined.
        """
        began, load = time.perf_counter(), None
        found = self._lookup.match(session, tokens, salt, leased=leased, hints=hints)
        try:
            at, size_bytes, wanted = 0, 0, list[tuple[pb.ChunkMatch, Integers]]()
            for match in found.matches:
                end = min(at + match.matched_tokens, len(tokens))
                if end > first:
                    targets = slots[at:end].copy()
                    targets[: max(0, first - at)] = -1
                    wanted.append((match, targets))
                    size_bytes += match.payload_bytes * (end - max(at, first)) // match.tokens
                at = end
            with closing(session.read(found.lease_id, [match for match, _ in wanted], self._timeout)) as payloads:
                for (match, targets), payload in zip(wanted, payloads, strict=True):
                    self._copier.unpack(targets, header_of(match, self._geometry), payload, after)
            if not session.leases_valid:
                raise ConnectionError("the session ended while chunks were copied")
            if at > first:
                load = CompletedLoad(at - first, size_bytes, time.perf_counter() - began)
            return LoadedPrefix(max(at, first), size_bytes)
        finally:
            self._lookup.release(found, load)
