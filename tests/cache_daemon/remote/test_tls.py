"""Backends over TLS: a server certificate is trusted by its authority, and by no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvsidecar.errors import ConfigurationError

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.condition_wait import until_async
from benchmarks.node import free_port
from benchmarks.remote_servers import RedisServer, S3Server, why_no_s3, why_no_valkey
from cache_daemon.durable.encryption import NullCipher
from cache_daemon.remote.address import Credentials, credentials_of, parse_remote
from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.backend_factory import new_backend
from cache_daemon.remote.coordinator import RemoteSettings
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_tier import RemoteTier
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, node, prompt
from tests.cache_daemon.stores import opened

needs_valkey = pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
needs_s3 = pytest.mark.skipif(bool(why_no_s3()), reason=why_no_s3())
PASSWORD = "a long password"
NOBODY = "its certificate is signed by nobody that is trusted here; see --remote-ca"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def port(authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a server that speaks TLS and nothing else."""
    issued, found = authority.issue("server", hosts=("localhost", "127.0.0.1")), free_port()
    # The last --port counts.
    flags = ("--port", "0", "--tls-port", str(found), "--tls-auth-clients", "no", "--requirepass", PASSWORD)
    files = ("--tls-cert-file", str(issued.certificate), "--tls-key-file", str(issued.key))
    with RedisServer(
        tmp_path_factory.mktemp("redis"), (*flags, *files, "--tls-ca-cert-file", str(authority.ca)), found
    ):
        yield found


@pytest.fixture(scope="module")
def store(authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 store that speaks TLS and nothing else."""
    if why_no_s3():
        pytest.skip(why_no_s3())
    issued = authority.issue("store", hosts=("127.0.0.1",))
    with S3Server(tmp_path_factory.mktemp("s3"), issued=issued) as server:
        yield server


@needs_valkey
@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_values_go_through_tls(port: int, authority: CertificateAuthority, scheme: str) -> None:
    credentials = Credentials(PASSWORD, authority.ca.read_bytes())
    engine = new_backend(parse_remote(f"{scheme}://localhost:{port}"), credentials)
    await engine.connect()
    try:
        large = bytes(range(256)) * 4096
        await engine.put_many([("a", large), ("b", b"x")], None)
        assert await engine.get_many(["a", "none", "b"]) == [large, None, b"x"]
    finally:
        await engine.close()


@needs_valkey
@pytest.mark.parametrize("scheme", ["rediss", "redis"])
async def test_who_is_not_vouched_for_and_who_does_not_speak_it_are_not_used(
    port: int, tmp_path: Path, scheme: str
) -> None:
    stranger = CertificateAuthority(tmp_path, "stranger").ca.read_bytes() if scheme == "rediss" else b""
    engine = new_backend(parse_remote(f"{scheme}://localhost:{port}"), Credentials(PASSWORD, stranger))
    with pytest.raises(RemoteFailed) as caught:
        await engine.connect()
    assert PASSWORD not in str(caught.value)
    if scheme == "rediss":
        assert str(caught.value) == NOBODY
    await engine.close()


@needs_s3
async def test_nodes_share_over_a_store_with_a_certificate(store: S3Server, authority: CertificateAuthority) -> None:
    credentials = credentials_of(S3Server.secret, None, authority.ca)
    engine = new_backend(parse_remote(store.url), credentials)
    async with node(engine, prefix="t", ttl_seconds=600) as a, node(engine, prefix="t") as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3), patience=20.0))[0] == 3 * CHUNK


@needs_s3
@pytest.mark.parametrize("wrong", ["authority", "nobody", "name", "plain"])
async def test_a_store_that_is_not_vouched_for_costs_nothing_but_the_sharing(
    store: S3Server, authority: CertificateAuthority, tmp_path: Path, wrong: str
) -> None:
    url, ca, why = store.url, authority.ca, NOBODY
    if wrong == "authority":
        ca = CertificateAuthority(tmp_path, "stranger").ca
    elif wrong == "name":
        url, why = url.replace("127.0.0.1", "localhost"), "is not for the name or address by which it is called"
    elif wrong == "plain":
        url, why = url.replace("https:", "http:"), "it speaks TLS; write its endpoint with https://"
    engine = new_backend(parse_remote(url), credentials_of(S3Server.secret, None, None if wrong == "nobody" else ca))
    tier = RemoteTier(engine, KeySchema("t"), NullCipher())
    async with opened(remote=RemoteSettings(tier, "all")) as bench:
        alone = FleetNode(bench, tier)
        await until_async(lambda: why in alone.stats.remote_failing)
        await alone.read(prompt(3))
        found, brought = await alone.ask(prompt(3))
        assert (found, brought.tokens) == (3 * CHUNK, 0)
        assert alone.stats.remote_lookups == 0, "an engine that is not trusted is not waited for"
        assert alone.stats.remote_written_chunks == 0
        assert S3Server.secret not in alone.stats.remote_failing


def test_an_authority_that_is_none_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "ca.pem"
    for text in (b"", b"no certificate", b"\xff"):
        wrong.write_bytes(text)
        with pytest.raises(ConfigurationError, match=r"ca\.pem has no certificate in PEM form"):
            credentials_of("", None, wrong)
