"""The service, put together from its parts."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer

from cache_daemon.rpc.admin_rpc import Keeping
from cache_daemon.rpc.chunk_rpc import Chunks
from cache_daemon.rpc.session_rpc import Attaching
from cache_daemon.rpc.stream_rpc import Streams


class CacheService(Attaching, Chunks, Streams, Keeping, CacheServiceServicer):
    """One instance for each door; all methods run on the daemon's event loop."""
