"""Health checks: a client that takes no data delays nobody."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.net import health_service
from kvsidecar.net.addresses import TcpAddress
from kvsidecar.net.channel import aio_channel
from kvsidecar.net.grpc_server import Listener, serve_listeners
from kvsidecar.net.health_service import HealthService

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SOON, GRACE_SECONDS = 5.0, 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, INITIAL_WINDOW_SIZE = 0, 1, 4, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def watch_without_window() -> bytes:
    """The bytes of a client that calls Watch and lets the server send no data (initial window of 0 bytes)."""

    def header(name: str, value: str) -> bytes:  # a literal without indexing (RFC 7541, section 6.2.2)
        return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    names = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "x"}
    names |= {"te": "trailers", "content-type": "application/grpc"}
    return (
        PREFACE
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + frame(HEADERS, 0x4, 1, b"".join(header(*one) for one in names.items()))
        + frame(DATA, 0x1, 1, b"\0" + struct.pack(">I", 0))
    )


@asynccontextmanager
async def watched(health: HealthService) -> AsyncIterator[tuple[str, socket.socket]]:
    """Serve health checks, with one client that takes no data; yield the address and the client's connection."""
    listener = Listener(TcpAddress("127.0.0.1", 0), None)
    async with serve_listeners("", [listener], lambda: GRACE_SECONDS, health=health) as (address,):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(watch_without_window())
            connection.settimeout(SOON)
            seen = b""
            while frame(HEADERS, 0x4, 1, b"")[3:] not in seen:  # the answer's headers, so Watch has begun to write
                got = await asyncio.to_thread(connection.recv, 4096)
                assert got, "the server has closed the connection"
                seen += got
            yield address, connection


async def test_a_client_that_takes_no_data_keeps_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's servicer wrote under a lock: no state changed any more, and the shutdown never ended."""
    monkeypatch.setattr(health_service, "_WRITE_SECONDS", 1.0)
    health = HealthService()
    async with asyncio.timeout(2 * SOON), watched(health) as (address, _):
        await asyncio.wait_for(health.set("", NOT_SERVING), SOON)
        async with aio_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON)
            assert answer.status == NOT_SERVING


async def test_a_client_that_watches_learns_of_the_end_and_does_not_delay_it() -> None:
    """Its call stays open for ever, so a shutdown took the whole grace period."""
    told: list[Any] = []

    async def follow(address: str, began: asyncio.Event) -> None:
        async with aio_channel(address) as channel:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                told.append(answer.status)
                began.set()

    listener, began = Listener(TcpAddress("127.0.0.1", 0), None), asyncio.Event()
    async with asyncio.timeout(2 * SOON):
        async with serve_listeners("", [listener], lambda: GRACE_SECONDS) as (address,):
            following = asyncio.create_task(follow(address, began))
            await began.wait()
        await following
    assert told == [SERVING, NOT_SERVING]


async def test_a_service_without_a_state() -> None:
    """Check ends with NOT_FOUND, and Watch says that the service is unknown and tells when it is known."""
    health, listener = HealthService(), Listener(TcpAddress("127.0.0.1", 0), None)
    async with (
        asyncio.timeout(2 * SOON),
        serve_listeners("", [listener], lambda: 0.1, health=health) as (address,),
        aio_channel(address) as channel,
    ):
        stub, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="later")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(asked)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watching = aiter(stub.Watch(asked))
        assert (await anext(watching)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await health.set("later", SERVING)
        assert (await anext(watching)).status == SERVING


async def test_watches_beyond_the_limit_are_refused_and_checks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections of a listener together could hold half a million calls that never end."""
    monkeypatch.setattr(health_service, "_MAX_WATCHES", 2)
    async with (
        asyncio.timeout(2 * SOON),
        serve_listeners("", [Listener(TcpAddress("127.0.0.1", 0), None)], lambda: 0.0) as (address,),
        aio_channel(address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        watches[0].cancel()
        while True:  # until the server has heard of it
            try:
                assert (await stub.Watch(health_pb2.HealthCheckRequest()).read()).status == SERVING
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
            else:
                break
