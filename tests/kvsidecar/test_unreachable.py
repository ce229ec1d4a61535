"""A client where nothing listens: one sentence, in our words and not in gRPC's."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from kvsidecar import AsyncClient, Client
from kvsidecar.errors import Unavailable, from_rpc

from benchmarks.node import free_port


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
