"""``python -m tests.cache_daemon.access.echo_daemon``: the daemon's doors in a process, without a store."""

from __future__ import annotations

import asyncio
import signal
import sys

from kvsidecar.cli.settings import run_service
from kvsidecar.serving import listening_at, refuse_second, stop_on_signals

from cache_daemon.access.doors import doors
from cache_daemon.access.tenants import CurrentTenants
from cache_daemon.config import DaemonConfig
from tests.cache_daemon.access.conftest import tenant_id
from tests.cache_daemon.access.echo import SERVICE, add_echo


async def serve(config: DaemonConfig) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    with refuse_second(config.socket):
        tenants = CurrentTenants(config.tenants, tenant_id)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, tenants.reload)
        async with listening_at(SERVICE, doors(config, tenants, add_echo), lambda: 0.0) as addresses:
            print(*addresses, flush=True)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(run_service("kvsidecar daemon", DaemonConfig, serve, sys.argv[1:]))
