"""Fake nodes of a fleet, which answer, refuse, break off or hang on command."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from benchmarks.node import free_port
from inference_svc.gateway.fleet import prefix_query
from inference_svc.gateway.fleet.fleet_app import FleetHandlers, create_app
from inference_svc.gateway.gateway_config import GatewayConfig

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]
SERVED: dict[str, Any] = {"models": [{"id": "m", "object": "model"}], "workers": 1, "busy": 0}


@dataclass(eq=False)
class Peer:
    """A fake node on a loopback address.

    ``prompts`` has the bodies of the requests for answers; ``began`` is set with the first one.
    """

    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    served: dict[str, Any] = field(default_factory=lambda: dict(SERVED))
    served_code: int = 200
    held_tokens: int = 0
    held: Any = None  # the answer to every request instead
    held_code: int = 200
    answer: Handler | None = None
    responses: frozenset[str] = frozenset()
    silent: bool = False
    tls: ssl.SSLContext | None = None
    prompts: list[dict[str, Any]] = field(default_factory=list)
    preferences: list[str] = field(default_factory=list)
    """Value of the header ``Prefer`` in each chat request."""
    keys: set[str] = field(default_factory=set)
    asked: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Peer]:
        server = await asyncio.start_server(self._connected, self.host, self.port, ssl=self.tls)
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.keys.add(headers.get("authorization", ""))
            path = head[0].split()[1]
            if path == "/v1/chat/completions":
                self.preferences.append(headers.get("prefer", ""))
            await self._serve(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _serve(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if self.silent:
            await asyncio.sleep(30)
        elif path == "/kvsidecar/v1/serving":
            await says(self.served, self.served_code)(writer)
        elif path.startswith("/kvsidecar/v1/held/"):
            self.asked += 1
            said = {"prompt_tokens": 1000, "held_tokens": self.held_tokens, "busy": self.served["busy"]}
            await says(self.held or said, self.held_code)(writer)
        elif path.startswith("/v1/responses/") and not body:
            name = path.rpartition("/")[2]
            await says({"id": name}, 200 if name in self.responses else 404)(writer)
        else:
            self.prompts.append(json.loads(body))
            self.began.set()
            await (self.answer or says({"from": self.url}))(writer)


def says(body: Any, code: int = 200) -> Handler:
    """Return a complete answer."""

    async def handler(writer: asyncio.StreamWriter) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + data)
        await writer.drain()

    return handler


def streams(*events: str, end: bool = True, begun: str = "") -> Handler:
    """Send events, and the text ``begun`` after them. Without ``end``, the connection breaks then."""

    async def handler(writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        for data in (*(f"data: {event}\n\n".encode() for event in events), *([begun.encode()] if begun else [])):
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if end:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    return handler


async def hangs(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def breaks(writer: asyncio.StreamWriter) -> None:
    """Close the connection without an answer."""


@asynccontextmanager
async def fleet_of(
    *peers: Peer, nodes: str = "", **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FleetHandlers]]:
    """Start a fleet gateway in this process, in front of these peers; yield it and a client."""
    async with AsyncExitStack() as stack:
        patience = stack.enter_context(pytest.MonkeyPatch.context())
        patience.setattr(prefix_query, "_TIMEOUT_SECONDS", 30)  # on a busy machine, peers answer late
        for peer in peers:
            await stack.enter_async_context(peer.listening())
        named = nodes or ",".join(peer.url for peer in peers)
        app = create_app(GatewayConfig(nodes=named, **settings))
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
        yield client, app.state.fleet


def named(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the DNS resolver; yield a name's addresses, at first 127.0.0.1. The test may change this list.

    If the list is empty, the resolver fails.
    """
    addresses = ["127.0.0.1"]

    async def look_up(_: object, host: str, port: int, **__: object) -> list[Any]:
        assert host == name
        if not addresses:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", look_up, raising=False)
    return addresses
