"""Process with the daemon's listeners but without a store: ``python -m tests.cache_daemon.auth.echo_daemon``."""

from __future__ import annotations

import asyncio
import signal
import sys

from kvsidecar.cli.service_settings import run_service
from kvsidecar.net.grpc_server import hold_socket_lock, serve_listeners, stop_on_signals

from cache_daemon.auth.tenants_table import ReloadableTenantsTable
from cache_daemon.config import DaemonConfig
from cache_daemon.listeners import build_listeners
from tests.cache_daemon.auth.conftest import tenant_id
from tests.cache_daemon.auth.echo import SERVICE, add_echo


async def serve(config: DaemonConfig) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    with hold_socket_lock(config.socket):
        tenants = ReloadableTenantsTable(config.tenants, tenant_id)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tenants.reload)
        async with serve_listeners(SERVICE, build_listeners(config, tenants, add_echo), lambda: 0.0) as addresses:
            print(*addresses, flush=True)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(run_service("kvsidecar daemon", DaemonConfig, serve, sys.argv[1:]))
