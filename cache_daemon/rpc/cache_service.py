"""The service, put together from its parts."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer

from cache_daemon.rpc.admin_rpc import AdminServicer
from cache_daemon.rpc.chunk_rpc import ChunkServicer
from cache_daemon.rpc.session_rpc import SessionServicer
from cache_daemon.rpc.stream_rpc import StreamServicer


class CacheService(SessionServicer, ChunkServicer, StreamServicer, AdminServicer, CacheServiceServicer):
    """One instance for each door; all methods run on the daemon's event loop."""
