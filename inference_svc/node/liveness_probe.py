"""Liveness probes of a node's processes."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from pathlib import Path
from typing import Protocol

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.net.http_health import health_status
from kvsidecar.process.runtime_dir import socket_target

PROBE_SECONDS = 3.0
"""Timeout of one probe."""
_CREDENTIALS = struct.Struct("3i")
# Short backoffs: by default, gRPC's backoff grows with every failed attempt.
_RECONNECT = (("grpc.max_reconnect_backoff_ms", 300), ("grpc.min_reconnect_backoff_ms", 100))


class Probe(Protocol):
    """Probe of one process. Runs on the event loop."""

    async def answers(self, pid: int) -> bool:
        """True if the process or a child of it serves. Takes at most ``PROBE_SECONDS``."""

    async def close(self) -> None: ...


class GrpcProbe:
    """Probe of the gRPC health service at a Unix socket.

    The answer must be SERVING. The probe also fails if another process listens at the socket, or if the socket's path
    was removed, because new clients could not connect.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel: grpc.aio.Channel | None = None

    async def answers(self, pid: int) -> bool:
        if self._channel is None:
            if not _listens(self._path, pid):
                return False
            self._channel = grpc.aio.insecure_channel(socket_target(self._path), options=_RECONNECT)
        if not self._path.is_socket():
            return False
        check = health_pb2_grpc.HealthStub(self._channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class HttpProbe:
    """Probe of a gateway's ``/health``.

    Any answer counts, including 503, which a gateway without a ready worker returns.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def answers(self, pid: int) -> bool:
        return await asyncio.to_thread(health_status, self._url, PROBE_SECONDS) is not None

    async def close(self) -> None:
        pass


def _listens(path: Path, pid: int) -> bool:
    """True if a process or a child of it listens at a Unix socket. Does not block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) not in (0, errno.EISCONN):
            return False
        listener = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    try:
        return bool(listener == pid or psutil.Process(listener).ppid() == pid)
    except psutil.Error:
        return False
