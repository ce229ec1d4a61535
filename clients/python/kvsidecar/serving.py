"""How both services listen: a private Unix socket, optionally TCP, health, reflection, a graceful end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvsidecar.errors import ConfigurationError
from kvsidecar.runtime import socket_target

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


@dataclass(frozen=True)
class Endpoint:
    """Where a service listens. ``tcp`` is ``host:port``, or empty for the socket alone."""

    service: str
    socket: Path
    tcp: str = ""
    max_message_bytes: int = 16 << 20


@asynccontextmanager
async def listening(
    endpoint: Endpoint, add: Callable[[grpc.aio.Server], None], grace_seconds: Callable[[], float]
) -> AsyncIterator[None]:
    """Serves while the body runs, then says NOT_SERVING, waits ``grace_seconds()`` for calls and removes the socket.

    The socket's mode is 0600 from the moment it exists. Raises ConfigurationError for an address that cannot be
    listened on.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", endpoint.max_message_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    add(server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((endpoint.service, _HEALTH), server)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(socket_target(endpoint.socket))
        await server.start()
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {endpoint.socket}: {error}") from error
    finally:
        os.umask(mask)
    os.chmod(endpoint.socket, 0o600)
    if endpoint.tcp:
        try:
            server.add_insecure_port(endpoint.tcp)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {endpoint.tcp!r}: {error}; write it like 127.0.0.1:7401"
            ) from error
    for name in ("", endpoint.service):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield
    finally:
        await health.enter_graceful_shutdown()
        await server.stop(grace_seconds())
        endpoint.socket.unlink(missing_ok=True)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Sets ``stop`` at SIGTERM and SIGINT. Call it on the loop's thread."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
