"""Daemon entry point: assembles memory, store, listeners and signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.durations import parse_duration
from kvsidecar.errors import ConfigurationError
from kvsidecar.net.grpc_server import ListenerLimits, hold_socket_lock, serve_listeners, stop_on_signals
from kvsidecar.net.health_service import HealthService
from kvsidecar.process.fd_limit import raise_descriptor_limit
from kvsidecar.process.runtime_dir import ensure_private_dir

from cache_daemon.auth.authenticator import PrincipalResolver, is_allowed, peer_credentials
from cache_daemon.auth.tenants_table import ReloadableTenantsTable
from cache_daemon.capacity_check import check_capacity, index_bytes
from cache_daemon.config import DaemonConfig
from cache_daemon.durable.encryption import cipher_for, key_from_file, parse_key
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.event_loop_monitor import EventLoopMonitor
from cache_daemon.eviction import POLICIES
from cache_daemon.gc_freeze import periodic_gc_freeze
from cache_daemon.listeners import build_listeners
from cache_daemon.memory.arena import ALIGNMENT, HostArena
from cache_daemon.memory.device_memory import CudaMemory, DeviceMemory, HostMemory
from cache_daemon.memory.fd_server import serve_fds
from cache_daemon.memory.gpu_arena import GpuArena
from cache_daemon.memory.shared_memory import SharedMemory
from cache_daemon.observability.call_metrics import CallMetrics
from cache_daemon.observability.otel import Telemetry, telemetry
from cache_daemon.observability.reuse_metrics import ReuseMetrics
from cache_daemon.observability.stats_snapshot import StatsSnapshots
from cache_daemon.observability.tier_health import DURABLE, OVERALL, REMOTE, report_health
from cache_daemon.observability.traffic_trace import record_traffic
from cache_daemon.prefork_supervisor import mark_serving, restart_counts, unblock_reload_signal
from cache_daemon.remote.address import credentials_of, parse_remote
from cache_daemon.remote.backend_factory import new_backend
from cache_daemon.remote.coordinator import RemoteSettings
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.rpc.cache_service import CacheService, add_to_server
from cache_daemon.rpc.servicer_base import ServiceState
from cache_daemon.store.bloom_filter import SUMMARY_BYTES, CountingBloomFilter
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.store_config import StoreConfig
from cache_daemon.store.tenant_accounts import TenantAccounts

GRACE_SECONDS = 3.0
# Exit code when some queued writes are not on disk.
_HUNG_EXIT = 1
_MAX_MESSAGE_BYTES = 16 << 20
SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

log = structlog.get_logger("cache_daemon")


async def serve(config: DaemonConfig, stop: asyncio.Event | None = None) -> None:
    """Run the daemon until SIGTERM, SIGINT, ``stop``, or the end of standard input if the configuration says so.

    Raises ConfigurationError, StoreUnavailable.
    """
    stop = stop or asyncio.Event()
    stop_on_signals(stop)
    if config.end_with_stdin:
        _stop_at_end_of_stdin(stop)
    raise_descriptor_limit()
    ensure_private_dir(config.socket.parent)
    check_capacity(config)
    tenants = ReloadableTenantsTable(config.tenants, keys.tenant_id)
    with (
        hold_socket_lock(config.socket),
        contextlib.closing(SharedMemory("summary", SUMMARY_BYTES, writable_by_others=False)) as summary,
    ):
        async with (
            telemetry(config.otlp_endpoint) as otel,
            _store(config, tenants, summary, otel) as store,
            EventLoopMonitor() as loop_monitor,
            periodic_gc_freeze(),
        ):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: _reload(tenants, store.accounts))
            unblock_reload_signal()
            with record_traffic(config.trace, config.trace_bytes) as traffic:
                on_lookup = traffic.record_prompt if traffic is not None else None
                shared = ServiceState(
                    store,
                    config.heartbeat_ms,
                    CallMetrics(otel.call_span),
                    loop_monitor.max_stall_ms,
                    on_lookup=on_lookup,
                    reuse=ReuseMetrics(lambda account: tenants().name_of(account), config.metrics_tenants),
                    restarts=restart_counts(),
                )
                snapshots = StatsSnapshots(shared.stats, shared.calls, shared.reuse, asyncio.get_running_loop())
                otel.observe(snapshots)
                with _metrics(snapshots, config):
                    await _serve(config, tenants, shared, summary, stop)


def _stop_at_end_of_stdin(stop: asyncio.Event) -> None:
    """Set ``stop`` at the end of standard input. Raises ConfigurationError for input that cannot be awaited."""
    loop, stdin = asyncio.get_running_loop(), 0

    def read() -> None:
        if not os.read(stdin, 1 << 12):
            loop.remove_reader(stdin)
            stop.set()

    try:
        loop.add_reader(stdin, read)
    except OSError as error:
        raise ConfigurationError(
            "end_with_stdin is set, and standard input is neither a pipe nor a terminal; leave it out"
        ) from error


@asynccontextmanager
async def _store(
    config: DaemonConfig, tenants: ReloadableTenantsTable, summary: SharedMemory, otel: Telemetry
) -> AsyncIterator[ChunkStore]:
    tier = await asyncio.to_thread(_tier, config, config.store) if config.store is not None else None
    store = ChunkStore(
        HostArena(config.arena_bytes),
        tier,
        StoreConfig(
            POLICIES[config.eviction],
            durable_budget_bytes=config.store_bytes if tier is not None else 0,
            staging_bytes=config.staging_bytes,
            max_index_bytes=index_bytes(config),
            span=otel.work_span,
        ),
        accounts=TenantAccounts(
            lambda account: tenants().limits_of(account), lambda tenant: tenants().account_of(tenant)
        ),
        remote=_remote(config),
        gpu_arena=_gpu_arena(config),
        # A trace must contain every prompt. With a Bloom filter, workers would not look up prompts that have no stored
        # prefix.
        bloom_filter=CountingBloomFilter(summary.memory) if config.trace is None else None,
    )
    try:
        await store.start()
        yield store
    finally:
        if not await store.close():
            log.error("the daemon ends without waiting for its disk any longer")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(_HUNG_EXIT)


def _tier(config: DaemonConfig, folder: Path) -> LmdbTier:
    return LmdbTier(
        folder,
        config.store_bytes,
        config.durability == "strict",
        config.compression,
        _key(config),
        replace_other_formats=True,
    )


def _key(config: DaemonConfig) -> bytes | None:
    """Return the encryption key of stored chunks; None without encryption."""
    if config.store_key_file is not None:
        return key_from_file(config.store_key_file)
    if given := config.store_key.get_secret_value():
        return parse_key(given.encode(), "the environment variable KVSIDECAR_CACHE_STORE_KEY")
    return None


def _remote(config: DaemonConfig) -> RemoteSettings | None:
    """Return the remote tier, not connected yet. Raises ConfigurationError."""
    if not config.remote:
        return None
    address = parse_remote(config.remote)
    tier = RemoteTier(
        new_backend(
            address,
            credentials_of(config.remote_secret.get_secret_value(), config.remote_secret_file, config.remote_ca),
        ),
        KeySchema(address.prefix),
        cipher_for(_key(config)),
    )
    ttl = None if config.remote_ttl == "none" else parse_duration(config.remote_ttl)
    return RemoteSettings(tier, config.remote_write, ttl, compress=config.compression != "none")


@contextlib.contextmanager
def _metrics(snapshots: StatsSnapshots, config: DaemonConfig) -> Iterator[None]:
    if not config.metrics_port:
        yield
        return
    # Imported only if needed: the import is slow, and a restart should be fast.
    from cache_daemon.observability.metrics_server import serve_metrics

    with serve_metrics(snapshots, config.metrics_port, config.metrics_host):
        yield


def _reload(tenants: ReloadableTenantsTable, accounts: TenantAccounts) -> None:
    if tenants.reload():
        accounts.reload()


def _gpu_arena(config: DaemonConfig) -> GpuArena | None:
    """Return the GPU arena, if there is one. The store closes it. Raises ConfigurationError."""
    if not config.gpu_arena:
        return None
    memory: DeviceMemory
    if config.gpu_memory == "host":
        memory = HostMemory(config.gpu_arena // ALIGNMENT * ALIGNMENT)
    else:
        memory = CudaMemory(config.gpu_arena, config.gpu_device)
    return GpuArena(memory)


async def _serve(
    config: DaemonConfig,
    tenants: ReloadableTenantsTable,
    shared: ServiceState,
    summary: SharedMemory,
    stop: asyncio.Event,
) -> None:
    store = shared.store
    memory_socket = config.socket.with_name(f"{config.socket.name}.memory").absolute()

    def add(server: grpc.aio.Server, principal_of: PrincipalResolver, at: Path | None) -> None:
        # Only this user's own processes share memory: the arena exposes every tenant's bytes.
        shares = str(memory_socket) if at == config.socket else ""
        add_to_server(CacheService(shared, principal_of, shares), server)

    def admits(peer: socket.socket) -> bool:
        return is_allowed(peer_credentials(peer), os.getuid())

    health = HealthService()

    async def set_overall(_: str, status: int) -> None:
        for name in ("", SERVICE):
            await health.set(name, status)

    async with (
        serve_fds(memory_socket, _SessionFds(store, summary), 0o600, admits),
        serve_listeners(
            SERVICE,
            build_listeners(config, tenants, add),
            # Attach streams stay open, so the server would wait for them in vain.
            lambda: 0.2 if len(store.sessions) else GRACE_SECONDS,
            ListenerLimits(message_bytes=_MAX_MESSAGE_BYTES),
            health,
        ),
        report_health(OVERALL, lambda: shared.calls.failing, set_overall, grace_seconds=0.0),
        report_health(DURABLE, (lambda: store.failing) if store.has_durable_tier else None, health.set),
        report_health(REMOTE, (lambda: store.remote_failing) if store.has_remote_tier else None, health.set),
    ):
        stats = store.stats()
        log.info(
            "serving",
            socket=str(config.socket),
            epoch=f"{store.epoch:x}",
            chunks=stats.chunks,
            tokens=stats.tokens,
            arena_bytes=stats.arena_bytes,
            format=keys.FORMAT_VERSION,
        )
        mark_serving()
        await stop.wait()
        log.info("stopping")


class _SessionFds:
    """Sends file descriptors of the arenas, staging and index summary to sessions."""

    def __init__(self, store: ChunkStore, summary: SharedMemory) -> None:
        self._store, self._summary = store, summary

    def arena(self, session_id: bytes, peer: socket.socket) -> None:
        self._store.staging_of(session_id)  # raises for sessions without shared memory
        arena = self._store.arena
        if isinstance(arena, HostArena):
            _give(peer, arena.descriptor)

    def gpu_arena(self, session_id: bytes, peer: socket.socket) -> None:
        """Send the GPU memory. From then on, chunks that the session matches are copied to it."""
        self._store.staging_of(session_id)
        if self._store.gpu is not None:
            self._store.gpu.arena.memory.send_handle(peer)
            self._store.sessions.get(session_id).reads_gpu = True

    def staging(self, session_id: bytes, peer: socket.socket) -> None:
        _give(peer, self._store.staging_of(session_id))

    def summary(self, session_id: bytes, peer: socket.socket) -> None:
        self._store.staging_of(session_id)
        _give(peer, self._summary.descriptor)


def _give(peer: socket.socket, descriptor: int) -> None:
    socket.send_fds(peer, [b"\1"], [descriptor])
