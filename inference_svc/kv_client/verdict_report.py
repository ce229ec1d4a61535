"""Hands a verification's verdict to the daemon."""

from __future__ import annotations

from pathlib import Path

import grpc
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.errors import Unavailable, from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

_WAIT_SECONDS = 3.0


def store_verdict(socket: Path, descriptor: NamespaceDescriptor, verdict: pb.ReuseVerdict) -> None:
    """Stores a verdict with a model's namespace; workers see it with their next heartbeat.

    Raises Unavailable, and what the daemon refuses.
    """
    link = DaemonConnection(ServiceAddress(socket), "verify", descriptor)
    try:
        session = link.session if link.wait(_WAIT_SECONDS) else None
        if session is None:
            raise Unavailable(f"no cache daemon answers on {socket}; start one, or leave --store-verdict out")
        request = pb.SetVerdictRequest(session_id=session.id, verdict=verdict)
        try:
            session.stub.SetVerdict(request, timeout=_WAIT_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc(error) from error
    finally:
        link.close()
