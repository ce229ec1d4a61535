"""Stores a verification's verdict in a cache daemon, for a process without a connector."""

from __future__ import annotations

import grpc
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.errors import Unavailable, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

_VERDICT_SECONDS = 3.0


def store_verdict(daemon: ServiceAddress, descriptor: NamespaceDescriptor, verdict: pb.ReuseVerdict) -> None:
    """Store a verification's verdict with a model's namespace; workers get it with their next heartbeat.

    Raises Unavailable, or the daemon's error.
    """
    link = DaemonConnection(daemon, "verify", descriptor)
    try:
        session = link.session if link.wait(_VERDICT_SECONDS) else None
        if session is None:
            raise Unavailable(f"no cache daemon answers on {daemon.target}; start one, or add --no-store")
        try:
            session.store_verdict(verdict, _VERDICT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
    finally:
        link.close()
