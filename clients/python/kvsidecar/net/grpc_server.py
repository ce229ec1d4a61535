"""gRPC server setup: Unix sockets and TCP ports.

Servers get health checks, reflection and graceful shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import grp
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvsidecar.errors import ConfigurationError
from kvsidecar.net.addresses import TcpAddress, parse_tcp, why_not_bindable
from kvsidecar.net.call_refusal import CallRefusal
from kvsidecar.net.health_service import HealthService
from kvsidecar.net.socket_watcher import SocketWatcher
from kvsidecar.process.runtime_dir import socket_target

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
Register = Callable[[grpc.aio.Server], None]

# Keepalive detects a peer that vanished (power, cable, a firewall that dropped the connection).
# The server ends the connection (GOAWAY) of a client that pings more often than the minimal interval.
_SERVER_KEEPALIVE_MS, _CLIENT_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS, _MIN_PING_INTERVAL_MS = (
    60_000,
    30_000,
    10_000,
    10_000,
)

# Limits of a listener for health checks only: a request is a service's name.
_HEALTH_MESSAGE_BYTES, _HEALTH_STREAMS = 4 << 10, 16

CLIENT_KEEPALIVE: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", _CLIENT_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options for every channel to one of our services: during a call, a peer that died or hangs is noticed within 40 s.

The keepalive timeout alone ends a call only if the peer's host is gone; a hung process has the ping timeout, else 60 s.
"""
DIRECT: tuple[str, int] = ("grpc.enable_http_proxy", 0)
"""Option for channels without TLS: a proxy that the environment names (``http_proxy``) would read every call, also one
to this host."""


@dataclass(frozen=True)
class ListenerLimits:
    """Resource limits of connections."""

    message_bytes: int = 16 << 20
    """Maximum size of a received message."""
    metadata_bytes: int = 16 << 10
    """Maximum metadata of one call."""
    streams: int = 1024
    """Maximum concurrent calls on one connection.

    Further calls wait at the client. They may fail with UNAVAILABLE at the moment when other calls end, because gRPC's
    server releases a call slightly later than its client.
    """
    connections: int = 512
    """Maximum concurrent connections at a listener that is not private; further connections are closed at once."""
    handshake_seconds: float = 10.0
    """Deadline of a connection's handshake (TLS, HTTP/2)."""


@dataclass(frozen=True)
class Listener:
    """One listening address and its service.

    The listeners of a process share health and shutdown.
    """

    at: Path | TcpAddress
    """A Unix socket's path, or a TCP address."""
    add: Register | None
    """Adds the servicer of this listener; None for health checks only, without reflection."""
    credentials: grpc.ServerCredentials | None = None
    """TLS credentials for a TCP address; None for a connection without TLS."""
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
    """Interceptors of all calls, including health and reflection."""
    group: str | None = None
    """Group that may connect to a Unix socket (mode 0660; "" is the process's own). None: only the owner (0600)."""
    service: str = ""
    """Full name of the service, for health and reflection; empty for the process's main service."""
    message_bytes: int | None = None
    """Maximum size of a received message; None for the process's limit."""
    streams: int | None = None
    """Maximum concurrent calls on one connection; None for the process's limit."""

    @property
    def private(self) -> bool:
        """Return whether only the owner of the process, and root, can connect."""
        return isinstance(self.at, Path) and self.group is None


@dataclass(frozen=True)
class Endpoint:
    """Addresses of a service with one servicer.

    These are the private socket, a TCP port without TLS unless ``tcp`` is empty, a port for health checks only unless
    ``health_tcp`` is empty, and the listeners in ``others``.
    """

    service: str
    socket: Path
    tcp: str = ""
    max_message_bytes: int = ListenerLimits.message_bytes
    health_tcp: str = ""
    others: tuple[Listener, ...] = ()
    streams: int = ListenerLimits.streams
    """Maximum concurrent calls on one connection."""
    refuse_seconds: float = 0.0
    """Time before the shutdown in which new calls get UNAVAILABLE, so that callers learn of it."""


@asynccontextmanager
async def serve_endpoint(
    endpoint: Endpoint,
    add: Register,
    grace_seconds: Callable[[], float],
    health: HealthService | None = None,
    at_once: asyncio.Event | None = None,
) -> AsyncIterator[list[str]]:
    """Serve at all addresses of an endpoint while the ``with`` block runs.

    ``at_once`` ends a shutdown's waiting: callers learn nothing more, and running calls are cancelled.
    """
    health, refusal, at_once = health or HealthService(), CallRefusal(), at_once or asyncio.Event()
    listeners = [Listener(endpoint.socket, add)]
    for address, register in ((endpoint.tcp, add), (endpoint.health_tcp, None)):
        try:
            if address:
                listeners.append(Listener(parse_tcp(address), register))
        except ValueError as error:
            raise ConfigurationError(f"cannot listen: {error}") from error
    listeners += endpoint.others
    listeners = [replace(listener, interceptors=(refusal, *listener.interceptors)) for listener in listeners]
    limits = ListenerLimits(message_bytes=endpoint.max_message_bytes, streams=endpoint.streams)
    async with serve_listeners(endpoint.service, listeners, grace_seconds, limits, health, at_once) as addresses:
        yield addresses
        await health.enter_graceful_shutdown()
        await refusal.refuse_for(endpoint.refuse_seconds, at_once)


@asynccontextmanager
async def serve_listeners(
    service: str,
    listeners: Sequence[Listener],
    grace_seconds: Callable[[], float],
    limits: ListenerLimits = ListenerLimits(),
    health: HealthService | None = None,
    at_once: asyncio.Event | None = None,
) -> AsyncIterator[list[str]]:
    """Serve at all listeners while the ``with`` block runs; yield their gRPC addresses.

    The addresses have the actual ports. All ports are bound before the first call is answered. On shutdown, all
    listeners report NOT_SERVING and wait ``grace_seconds()``, or until ``at_once``, for their calls; then the sockets
    are removed. A Unix socket gets its mode before clients can connect. If its path is deleted, a second server listens
    at a new socket of the same path, and the first server keeps its connections. ``health`` may have further names with
    their own states. Raises ConfigurationError for an address that cannot be bound, and then leaves nothing open.
    """
    health = health or HealthService()
    async with contextlib.AsyncExitStack() as stack:
        servers: list[grpc.aio.Server] = []

        def bind(listener: Listener) -> str:
            server = _server(service, listener, health, limits)
            if isinstance(listener.at, Path):
                address = stack.enter_context(_bound_socket(server, listener.at, listener.group))
            else:
                address = _bind_port(server, listener.at, listener.credentials)
            stack.push_async_callback(server.stop, None)
            servers.append(server)
            return address

        async def bind_again(listener: Listener) -> None:
            # The earlier server keeps running, because it has open connections, and its shutdown would delete the new
            # server's socket.
            bind(listener)
            await servers[-1].start()

        addresses = [bind(listener) for listener in listeners]
        for server in servers:
            await server.start()
        for name in {"", service, *(listener.service for listener in listeners)}:
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            async with contextlib.AsyncExitStack() as kept:
                for listener in listeners:
                    if isinstance(listener.at, Path):
                        watch = SocketWatcher(listener.at, partial(bind_again, listener), private=listener.private)
                        await kept.enter_async_context(watch)
                yield addresses
        finally:
            await health.enter_graceful_shutdown()
            grace = grace_seconds()
            ending = asyncio.create_task(_cancel_calls(servers, at_once)) if at_once is not None else None
            await asyncio.gather(*(server.stop(grace) for server in servers))
            if ending is not None:
                ending.cancel()


async def _cancel_calls(servers: Sequence[grpc.aio.Server], at_once: asyncio.Event) -> None:
    await at_once.wait()
    await asyncio.gather(*(server.stop(None) for server in servers))


def _listener_limits(listener: Listener, limits: ListenerLimits) -> ListenerLimits:
    """Return a listener's limits.

    A listener without authentication, which serves only health checks, gets the lowest limits.
    """
    if listener.add is None:
        return replace(limits, message_bytes=_HEALTH_MESSAGE_BYTES, streams=_HEALTH_STREAMS)
    return replace(
        limits,
        message_bytes=limits.message_bytes if listener.message_bytes is None else listener.message_bytes,
        streams=limits.streams if listener.streams is None else listener.streams,
    )


def _server(service: str, listener: Listener, health: HealthService, limits: ListenerLimits) -> grpc.aio.Server:
    limits = _listener_limits(listener, limits)
    options = [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_seconds * 1000)),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _SERVER_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]
    if not listener.private:
        options.append(("grpc.max_allowed_incoming_connections", limits.connections))
    server = grpc.aio.server(interceptors=listener.interceptors, options=options)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if listener.add is not None:
        listener.add(server)
        reflection.enable_server_reflection((listener.service or service, HEALTH), server)
    return server


@contextlib.contextmanager
def _bound_socket(server: grpc.aio.Server, path: Path, group: str | None) -> Iterator[str]:
    target = socket_target(path)
    number = _group_number(group) if group is not None else -1
    if group is not None:
        _refuse_replaceable(path)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(target)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)
    try:
        if group is not None:
            _open_to_group(path, number)
        yield target
    finally:
        path.unlink(missing_ok=True)


def _group_number(name: str) -> int:
    if not name:
        return os.getgid()
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigurationError(f"there is no group {name!r} on this machine; name one that exists") from None


def _refuse_replaceable(path: Path) -> None:
    """Refuse a folder in which a group member could replace the socket.

    That member could impersonate the service.
    """
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror}; create its folder first") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"others can write to the folder of {path} and so replace the socket; run: chmod go-w {path.parent}"
        )


def _open_to_group(path: Path, group: int) -> None:
    try:
        if path.stat().st_gid != group:
            os.chown(path, -1, group)
    except OSError as error:
        raise ConfigurationError(
            f"cannot give {path} to the group {group}: {error.strerror}; choose a group that this user is in"
        ) from error
    path.chmod(0o660)


def _bind_port(server: grpc.aio.Server, address: TcpAddress, credentials: grpc.ServerCredentials | None) -> str:
    why = why_not_bindable(address) if address.port else ""
    try:
        if why:
            raise RuntimeError(why)
        port = (
            server.add_secure_port(str(address), credentials)
            if credentials is not None
            else server.add_insecure_port(str(address))
        )
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error}; choose another address or port") from error
    return str(TcpAddress(address.host, port))


@contextlib.contextmanager
def hold_socket_lock(path: Path, what: str = "daemon") -> Iterator[None]:
    """Hold the exclusive right to listen at a Unix socket while the ``with`` block runs.

    A lock on ``PATH.lock``, which the kernel releases with the process, decides between two processes that start at the
    same time: only its owner removes a dead process's socket. The lock file stays. Raises ConfigurationError when
    another process listens at the socket or is about to.
    """
    socket_target(path)  # refuses a path that is too long for a socket
    taken = ConfigurationError(f"another {what} listens on {path}; stop it, or choose another --socket")
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot lock {path}: {error.strerror}; choose another --socket") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken from None
        if _has_listener(path):
            raise taken
        if path.exists() and not path.is_socket():
            raise ConfigurationError(f"{path} is there and is no socket; remove it, or choose another --socket")
        path.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


def _has_listener(path: Path) -> bool:
    """Return whether a server listens.

    Only ECONNREFUSED and ENOENT mean that no server listens: a full backlog gives EAGAIN.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def stop_on_signals(stop: asyncio.Event, at_once: asyncio.Event | None = None) -> None:
    """Set ``stop`` at SIGTERM and SIGINT, and ``at_once`` at a second one. Call it on the loop's thread."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set() and at_once is not None:
            at_once.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
