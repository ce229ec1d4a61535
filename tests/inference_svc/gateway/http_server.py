"""A gateway's application behind its own HTTP server, on a socket of this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_server import _Server, configured
from inference_svc.gateway.routes import create_app


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[int, FastAPI]]:
    """Its port, and the application. Without settings no worker is up."""
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
    """How many requests or connections were refused for this reason."""
    return float(app.state.counters.refused.labels(reason)._value.get())


async def said_to(port: int, said: bytes, seconds: float = 30) -> bytes:
    """All that comes until the other end closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()
