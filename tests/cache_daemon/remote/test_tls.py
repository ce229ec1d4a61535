"""Engines over TLS: a real server with a certificate of an authority, believed by that one and by no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.node import free_port
from benchmarks.remote_servers import RedisServer, why_no_valkey
from cache_daemon.remote.address import Credentials, new_engine, parse_remote
from cache_daemon.remote.engine import RemoteFailed
from tests.cache_daemon.access.authority import Authority

pytestmark = pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
PASSWORD = "a long password"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that speaks TLS and nothing else."""
    issued, found = authority.issue("server", hosts=("localhost", "127.0.0.1")), free_port()
    # The last --port counts.
    flags = ("--port", "0", "--tls-port", str(found), "--tls-auth-clients", "no", "--requirepass", PASSWORD)
    files = ("--tls-cert-file", str(issued.certificate), "--tls-key-file", str(issued.key))
    with RedisServer(
        tmp_path_factory.mktemp("redis"), (*flags, *files, "--tls-ca-cert-file", str(authority.ca)), found
    ):
        yield found


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_values_go_through_tls(port: int, authority: Authority, scheme: str) -> None:
    credentials = Credentials(PASSWORD, authority.ca.read_bytes())
    engine = new_engine(parse_remote(f"{scheme}://localhost:{port}"), credentials)
    await engine.connect()
    try:
        large = bytes(range(256)) * 4096
        await engine.put_many([("a", large), ("b", b"")], None)
        assert await engine.get_many(["a", "none", "b"]) == [large, None, b""]
    finally:
        await engine.close()


@pytest.mark.parametrize("scheme", ["rediss", "redis"])
async def test_who_is_not_vouched_for_and_who_does_not_speak_it_are_not_used(
    port: int, tmp_path: Path, scheme: str
) -> None:
    stranger = Authority(tmp_path, "stranger").ca.read_bytes() if scheme == "rediss" else b""
    engine = new_engine(parse_remote(f"{scheme}://localhost:{port}"), Credentials(PASSWORD, stranger))
    with pytest.raises(RemoteFailed) as caught:
        await engine.connect()
    assert PASSWORD not in str(caught.value)
    await engine.close()
