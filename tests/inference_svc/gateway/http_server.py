"""Running gateways: an application on a socket of this process, or a separate process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from benchmarks.node import free_port
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_server import _Server, configured
from inference_svc.gateway.routes import create_app


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[int, FastAPI]]:
    """Run a gateway in this process; yield its port and application. Without settings, no worker is up."""
    chosen: dict[str, Any] = {"workers": "127.0.0.1:1", "cache_socket": None, **settings}
    config = GatewayConfig(**chosen)
    app = create_app(config)
    server = _Server(configured(app, config), app.state.drain)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1], app
        finally:
            server.should_exit = True
            await task


def refused(app: FastAPI, reason: str) -> float:
    """Return the number of requests or connections that were refused for this reason."""
    return float(app.state.counters.refused.labels(reason)._value.get())


async def said_to(port: int, said: bytes, seconds: float = 30) -> bytes:
    """Send bytes; return all bytes that arrive until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()


@contextmanager
def gateway_process(descriptors: str, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a gateway process with a limit of file descriptors, as for ``prlimit --nofile``; yield process and port."""
    port = free_port()
    command = [sys.executable, "-m", "inference_svc", "gateway", *flags, "--port", str(port)]
    with subprocess.Popen(
        ["prlimit", f"--nofile={descriptors}", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as gateway:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert httpx.get(f"http://127.0.0.1:{port}/version", timeout=5).status_code == 200
                    break
                except httpx.TransportError:
                    assert gateway.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield gateway, port
        finally:
            gateway.terminate()
