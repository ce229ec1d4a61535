"""The service, put together from its parts."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer

from cache_daemon.rpc.attaching import Attaching
from cache_daemon.rpc.chunks import Chunks
from cache_daemon.rpc.keeping import Keeping
from cache_daemon.rpc.streams import Streams


class CacheService(Attaching, Chunks, Streams, Keeping, CacheServiceServicer):
    """One instance for each door; all methods run on the daemon's event loop."""
