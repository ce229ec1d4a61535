"""Clients that never read, ask too much at once, or speak HTTP that could be read in two ways."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from contextlib import suppress

import httpx
import pytest
from fastapi import FastAPI, Response

from benchmarks.condition_wait import until_async
from inference_svc.gateway import connection_limits
from inference_svc.gateway.connection_limits import MAX_PIPELINED
from tests.inference_svc.gateway.http_server import gateway_process, listening, refused, said_to

ASK = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'


def unread(port: int, said: bytes) -> socket.socket:
    """A client that takes a few KB and no more."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect(("127.0.0.1", port))
    made.sendall(said)
    return made


def answer_with(app: FastAPI, size: int) -> None:
    """Makes an answer of so many bytes of one that is smaller."""
    route = next(r for r in app.routes if getattr(r, "path", "") == "/openapi.json")
    route.app = Response(b"x" * size)  # type: ignore[attr-defined]


@pytest.mark.parametrize("said", [ASK * 12, ASK[:-2] + b"Connection: close\r\n\r\n"], ids=["kept", "closing"])
async def test_a_client_that_never_reads_is_dropped(said: bytes) -> None:
    async with listening(send_seconds=0.3) as (port, app):
        answer_with(app, 16 << 20)
        with unread(port, said) as client:
            await until_async(lambda: refused(app, "unread") == 1)
            with suppress(ConnectionResetError):  # what was sent before, and the end
                while await asyncio.to_thread(client.recv, 65536):
                    pass


async def test_a_client_that_reads_slowly_is_not() -> None:
    async with listening(send_seconds=1.5) as (port, app):
        answer_with(app, 16 << 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
        writer.write(ASK[:-2] + b"Connection: close\r\n\r\n")
        size = 0
        while part := await reader.read(256 << 10):
            size += len(part)
            await asyncio.sleep(0.05)
        writer.close()
        assert size > 16 << 20
        assert refused(app, "unread") == 0


async def test_of_requests_that_come_at_once_some_are_answered() -> None:
    async with listening() as (port, app):
        found = await said_to(port, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * (3 * MAX_PIPELINED))
        assert found.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED
        assert refused(app, "pipelined") == 1


async def test_the_openapi_document_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as (port, _):
        said = ASK[:-2] + b"Connection: close\r\n\r\n"
        first = await said_to(port, said)
        monkeypatch.setattr(json, "dumps", None)  # a client without a key can ask again and again
        again = await said_to(port, said)
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert again.splitlines()[-1] == first.splitlines()[-1]


async def test_health_is_answered_when_all_connections_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.gateway.gateway_server.max_connections", lambda descriptors_each: 2)
    monkeypatch.setattr(connection_limits, "_RESERVE", 1)
    async with listening() as (port, app):
        taken = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        answers = {}
        for path in ("/health", "/version"):
            answers[path] = await said_to(port, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
        assert b"no worker is up" in answers["/health"]
        assert answers["/version"].startswith(b"HTTP/1.1 503")
        assert b"as many connections are open as may be" in answers["/version"]
        spare = await asyncio.open_connection("127.0.0.1", port)
        beyond = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):
                assert await beyond[0].read() == b""
        assert refused(app, "connections") == 2
        for _, writer in (*taken, spare, beyond):
            writer.close()


def test_clients_that_take_all_descriptors_do_not_take_healths() -> None:
    with gateway_process("128:128", "--workers", "127.0.0.1:1") as (gateway, port):
        assert resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE) == (128, 128)
        held = [unread(port, ASK * 40) for _ in range(50)]  # more than the 32 that are for all
        try:
            answers = [httpx.get(f"http://127.0.0.1:{port}/health", timeout=60) for _ in range(5)]
        finally:
            for one in held:
                one.close()
    assert [answer.json()["status"] for answer in answers] == ["no worker is up"] * 5


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "said",
    [
        HEAD
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD.replace(b"\r\n", b"\n") + b"Content-Length: 29\n\n" + BODY,
        HEAD.replace(b"t\r\n", b"t\n") + b"Content-Length: 29\r\n\r\n" + BODY,
        b"\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["length and chunked", "chunked and length", "lf alone", "one lf", "lf before"],
)
async def test_what_two_servers_could_read_in_two_ways_is_refused_and_the_connection_closed(said: bytes) -> None:
    async with listening() as (port, _):
        found = await said_to(port, said)
        assert found.startswith(b"HTTP/1.1 400 ")
        assert found.count(b"HTTP/1.1") == 1


async def test_a_body_may_have_any_line_ends_and_a_head_may_come_in_pieces() -> None:
    body = b'{"prompt":\n"a",\r\n"max_tokens":\n1}'
    said = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with listening() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(said), 7):
            writer.write(said[at : at + 7])
            await writer.drain()
            await asyncio.sleep(0.001)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")  # there is no worker
        writer.close()


async def test_nothing_leads_where_a_host_says() -> None:
    async with listening(allow_hosts="evil.example") as (port, _):
        found = await said_to(port, b"GET /health/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 404 ")
        assert b"location:" not in found.lower()
