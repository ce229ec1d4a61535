"""A client where nothing listens, or nothing answers any longer: one sentence, in our words and not in gRPC's."""

from __future__ import annotations

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from kvsidecar import AsyncClient, Client, client
from kvsidecar.errors import Unavailable, from_rpc

from benchmarks.node import free_port
from benchmarks.proxy import Proxy
from tests.clients.scripted_worker import ScriptedWorker


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    said = re.escape(f"nothing answers at {tmp_path / 'none.sock'} (No such file or directory); is it running?")
    with Client(tmp_path / "none.sock") as client, pytest.raises(Unavailable, match=said):
        client.generate("hello")
    with Client(tmp_path / "none.sock") as client, pytest.raises(Unavailable, match=said):
        list(client.stream("hello"))


class Failing(grpc.RpcError):
    """A call that failed in the transport, without an answer of the server."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "UNAVAILABLE: Socket closed"),
        (grpc.StatusCode.UNKNOWN, "what", "INTERNAL: UNKNOWN: what"),
    ],
)
def test_an_error_that_is_shown_with_its_reason_says_it_once(code: grpc.StatusCode, text: str, said: str) -> None:
    error = from_rpc(Failing(code, text))
    assert f"{error.reason}: {error}" == said


def test_a_port_where_nobody_listens() -> None:
    async def ask(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.generate("hello")

    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=re.escape(f"nothing answers at {address} (Connection refused)")):
        asyncio.run(ask(address))


@pytest.mark.alone
def test_a_server_that_was_away_for_long_is_found_at_once() -> None:
    """With gRPC's own options, the attempt after the one at 5 s comes at 9 s, and later ones two minutes apart."""
    port, began = free_port(), time.monotonic()
    with Client(f"127.0.0.1:{port}") as asking:

        def found() -> bool:
            try:
                return asking.tokenize("hello") == [1, 2]
            except Unavailable:
                return False

        while time.monotonic() < began + 6:
            assert not found()
            time.sleep(0.05)
        with ScriptedWorker(port):
            up = time.monotonic()
            while not found():
                assert time.monotonic() < up + 2
                time.sleep(0.05)


def test_a_call_to_a_host_that_went_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing closes its connection: only pings notice it. Time is made 50 times faster."""
    faster = [(key, value // 50 if "keepalive_time_ms" in key else value) for key, value in client._OPTIONS]
    monkeypatch.setattr(client, "_OPTIONS", [(k, 1000 if "timeout" in k else v) for k, v in faster])
    port = free_port()
    with ScriptedWorker(port):
        link = Proxy(port)
        try:
            with Client(f"127.0.0.1:{link.port}") as asking, ThreadPoolExecutor(1) as other:
                assert asking.tokenize("hello") == [1, 2]
                call = other.submit(asking.tokenize, "wait")
                time.sleep(0.3)
                link.hang()
                with pytest.raises(Unavailable):
                    call.result(timeout=15)
        finally:
            link.close()
