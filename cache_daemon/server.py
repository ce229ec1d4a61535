"""Starts the daemon: socket, services, signals, graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import structlog
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cache.v1.cache_pb2_grpc import add_CacheServiceServicer_to_server
from kvsidecar.errors import ConfigurationError
from kvsidecar.keys import FORMAT_VERSION
from kvsidecar.runtime import ensure_private_dir
from kvsidecar.serving import Endpoint, listening, stop_on_signals

from cache_daemon.arena import ALIGNMENT, Arena, HostArena, SharedFile
from cache_daemon.config import DaemonConfig
from cache_daemon.device_arena import DeviceArena, handing_out
from cache_daemon.device_memory import CudaMemory, DeviceMemory, HostMemory
from cache_daemon.durable import LmdbTier
from cache_daemon.metrics import serve_metrics
from cache_daemon.service import CacheService
from cache_daemon.store import ChunkStore
from cache_daemon.summary import SUMMARY_BYTES, SummaryWriter

GRACE_SECONDS = 3.0
_MAX_MESSAGE_BYTES = 64 << 20
SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

log = structlog.get_logger("cache_daemon")


def arena_folder(config: DaemonConfig) -> Path:
    """A folder in tmpfs that belongs to this daemon's socket alone, so that what is in it is a dead daemon's."""
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
    with _shared_folder(config) as folder, _summary(folder) as summary:
        arena = _arena(config, folder)
        store = ChunkStore(arena, durable, config.store_bytes if durable else 0, summary=summary)
        try:
            shared = handing_out(arena, store.has_session) if isinstance(arena, DeviceArena) else nullcontext()
            async with shared:
                await _serve(config, store, stop or asyncio.Event())
        finally:
            store.close()


@contextlib.contextmanager
def _shared_folder(config: DaemonConfig) -> Iterator[Path]:
    folder = arena_folder(config)
    for stale in folder.iterdir():
        stale.unlink(missing_ok=True)
    try:
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def _summary(folder: Path) -> Iterator[SummaryWriter]:
    with contextlib.closing(SharedFile(folder, "summary", SUMMARY_BYTES)) as file:
        yield SummaryWriter(file.memory, file.path)


def _arena(config: DaemonConfig, folder: Path) -> Arena:
    """The hot tier's memory; the store closes it."""
    if not config.gpu_arena:
        return HostArena(config.arena_bytes, folder)
    memory: DeviceMemory
    if config.gpu_memory == "host":
        memory = HostMemory(config.gpu_arena // ALIGNMENT * ALIGNMENT)
    else:
        memory = CudaMemory(config.gpu_arena, config.gpu_device)
    return DeviceArena(memory, config.socket.with_name(f"{config.socket.name}.arena"))


async def _serve(config: DaemonConfig, store: ChunkStore, stop: asyncio.Event) -> None:
    service = CacheService(store, config.heartbeat_ms)
    endpoint = Endpoint(SERVICE, config.socket, config.tcp, _MAX_MESSAGE_BYTES)
    stop_on_signals(stop)
    async with listening(
        endpoint,
        lambda server: add_CacheServiceServicer_to_server(service, server),
        # Attached workers hold their streams: there is nothing to wait for.
        lambda: 0.2 if store.stats().sessions else GRACE_SECONDS,
    ):
        if config.metrics_port:
            serve_metrics(store, config.metrics_port)
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
