"""Online backup: reads the chunks of a running daemon for an archive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import ChunkNotFound, from_rpc

from cache_daemon.durable.durable_tier import ReadJob, ReadResult
from cache_daemon.durable.record_format import EXPIRY_NOTE_PREFIX, encode_expiry

_PAGE, _CALL_SECONDS = 1000, 120.0


class OnlineBackup:
    """The chunks that a daemon listed at one time, except chunks that it removes before they are read.

    ``daemon`` is a stub of a listener where the caller is an operator. ``roots`` are the tenant roots to read (None:
    all). Chunks are immutable and a parent comes before its children, so an archive of them is consistent even if the
    daemon stores and removes chunks meanwhile. Methods raise KVSidecarError.
    """

    def __init__(self, daemon: Any, roots: frozenset[bytes] | None = None) -> None:
        self._daemon = daemon
        self._chunks = {chunk.prefix_hash: chunk for chunk in self._listed() if roots is None or chunk.root in roots}
        self._listed_at = time.time()
        self._fetched: Any = None

    def stored_keys(self) -> list[bytes]:
        """Return the prefix hashes, parents before children."""
        return sorted(self._chunks, key=lambda name: self._chunks[name].start_position)

    def notes(self) -> dict[bytes, bytes]:
        """Return the expiries as the durable tier's notes."""
        return {
            EXPIRY_NOTE_PREFIX + name: encode_expiry(self._listed_at + chunk.ttl_seconds)
            for name, chunk in self._chunks.items()
            if chunk.HasField("ttl_seconds")
        }

    def header(self, prefix_hash: bytes) -> ChunkHeader | None:
        """Begin to fetch a chunk; None when it is no longer there."""
        if self._fetched is not None:
            self._fetched.cancel()
        request = pb.FetchRequest(root=self._chunks[prefix_hash].root, prefix_hash=prefix_hash)
        self._fetched = self._daemon.Fetch(request, timeout=_CALL_SECONDS)
        try:
            found: ChunkHeader = next(self._fetched).header
        except grpc.RpcError as error:
            _check_missing(error)
            return None
        return found

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """Read the payload of the chunk whose header was requested last."""
        (job,) = jobs
        position = 0
        try:
            for message in self._fetched:
                end = position + len(message.data)
                if end > len(job.target):
                    return [ReadResult.CORRUPT]
                job.target[position:end] = message.data
                position = end
        except grpc.RpcError as error:
            _check_missing(error)
            return [ReadResult.FAILED]
        whole = position == len(job.target) and keys.checksum(job.target) == job.checksum
        return [ReadResult.OK if whole else ReadResult.CORRUPT]

    def _listed(self) -> list[pb.ChunkInfo]:
        found, token = list[pb.ChunkInfo](), b""
        while True:
            try:
                page = self._daemon.List(pb.ListRequest(page_size=_PAGE, page_token=token), timeout=_CALL_SECONDS)
            except grpc.RpcError as error:
                raise from_rpc(error) from error
            found += page.chunks
            token = page.next_page_token
            if not token:
                return found


def _check_missing(error: grpc.RpcError) -> None:
    """Raise the KVSidecarError of a failure, unless a chunk was evicted or deleted meanwhile."""
    kind = from_rpc(error)
    if not isinstance(kind, ChunkNotFound):
        raise kind from error
