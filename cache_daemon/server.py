"""Starts the daemon: socket, services, signals, graceful end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import add_CacheServiceServicer_to_server
from kvsidecar.errors import ConfigurationError
from kvsidecar.keys import FORMAT_VERSION
from kvsidecar.runtime import ensure_private_dir, socket_target

from cache_daemon.arena import HostArena
from cache_daemon.config import DaemonConfig
from cache_daemon.durable import LmdbTier
from cache_daemon.metrics import serve_metrics
from cache_daemon.service import CacheService
from cache_daemon.store import ChunkStore

GRACE_SECONDS = 3.0
_MAX_MESSAGE_BYTES = 64 << 20
SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

log = structlog.get_logger("cache_daemon")


def arena_folder(config: DaemonConfig) -> Path:
    """A folder in tmpfs that belongs to this daemon's socket alone, so that stale arenas in it can be removed."""
    from hashlib import sha256

    name = sha256(str(config.socket.absolute()).encode()).hexdigest()[:16]
    return ensure_private_dir(ensure_private_dir(config.arena_dir / f"kvsidecar-{os.getuid()}") / name)


async def _refuse_second(path: Path) -> None:
    """Raises ConfigurationError when a daemon listens on the socket; removes a dead one's."""
    if not path.exists():
        return
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        path.unlink()
        return
    writer.close()
    raise ConfigurationError(f"another daemon listens on {path}; stop it, or choose another --socket")


async def serve(config: DaemonConfig, stop: asyncio.Event | None = None) -> None:
    """Runs the daemon until SIGTERM, SIGINT or ``stop``. Raises ConfigurationError, StoreUnavailable."""
    ensure_private_dir(config.socket.parent)
    await _refuse_second(config.socket)
    durable = (
        LmdbTier(config.store, config.store_bytes, config.durability == "strict") if config.store is not None else None
    )
    arena = HostArena(config.arena_bytes, arena_folder(config))
    store = ChunkStore(arena, durable, config.store_bytes if durable else 0)
    try:
        await _serve(config, store, stop or asyncio.Event())
    finally:
        store.close()
        arena.path.parent.rmdir()


async def _serve(config: DaemonConfig, store: ChunkStore, stop: asyncio.Event) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    add_CacheServiceServicer_to_server(CacheService(store, config.heartbeat_ms), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), server)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(socket_target(config.socket))
        await server.start()
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {config.socket}: {error}") from error
    finally:
        os.umask(mask)
    os.chmod(config.socket, 0o600)
    if config.tcp:
        try:
            server.add_insecure_port(config.tcp)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {config.tcp!r}: {error}; write it like 127.0.0.1:7401"
            ) from error
    if config.metrics_port:
        serve_metrics(store, config.metrics_port)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    stats = store.stats()
    log.info(
        "serving",
        socket=str(config.socket),
        epoch=f"{store.epoch:x}",
        chunks=stats.chunks,
        tokens=stats.tokens,
        arena_bytes=stats.arena_bytes,
        format=FORMAT_VERSION,
    )
    await stop.wait()
    log.info("stopping")
    await health.enter_graceful_shutdown()
    await server.stop(GRACE_SECONDS if not stats.sessions else 0.2)
    config.socket.unlink(missing_ok=True)
