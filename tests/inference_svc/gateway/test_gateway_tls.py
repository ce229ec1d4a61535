"""The commands that ask a gateway with TLS, here one that lets in only clients with a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.cli.root_command import app
from kvsidecar.errors import ConfigurationError, Unavailable, UnknownRequest
from kvsidecar.net.channel import listens
from kvsidecar.net.http_health import health_status
from typer.testing import CliRunner

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.condition_wait import until
from benchmarks.node import Node, free_port
from tests.inference_svc.gateway.conftest import of_node

COMMANDS = [
    ("chat", "--max-tokens", "2"),
    ("generate", "hello", "--max-tokens", "2"),
    ("warm", __file__),
    ("why", "x"),
    ("bench", "--requests", "1", "--prefixes", "1", "--prefix-words", "5", "--max-tokens", "2"),
]


@dataclass(frozen=True)
class Encrypted:
    """A gateway with TLS, and the options to reach it."""

    port: int
    ca: tuple[str, str]
    own: tuple[str, str, str, str]
    """Options of the client's certificate."""

    def run(self, command: tuple[str, ...], *options: str, host: str = "127.0.0.1") -> Any:
        arguments = [*command, "--url", f"https://{host}:{self.port}/v1", *options]
        return CliRunner().invoke(app, arguments, input="hello\n\n", env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def encrypted(two: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    authority = CertificateAuthority(tmp_path_factory.mktemp("authority"))
    server, client = authority.issue("server", hosts=("127.0.0.1",)), authority.issue("client")
    files = {"--tls-cert": server.certificate, "--tls-key": server.key, "--tls-client-ca": authority.ca}
    gateway = of_node(two, *(f"{flag}={file}" for flag, file in files.items()), wait=False)
    until(lambda: listens(f"127.0.0.1:{gateway.port}"))
    own = ("--cert", str(client.certificate), "--key", str(client.key))
    yield Encrypted(gateway.port, ("--ca", str(authority.ca)), own)
    gateway.close()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_trusts_the_named_authority_and_shows_its_certificate(
    encrypted: Encrypted, command: tuple[str, ...]
) -> None:
    done = encrypted.run(command, *encrypted.ca, *encrypted.own)
    if command[0] == "why":
        assert isinstance(done.exception, UnknownRequest), "the gateway answered"
    else:
        assert done.exit_code == 0, done.exception


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_certificate_that_is_not_trusted_is_said_with_what_to_do(
    encrypted: Encrypted, command: tuple[str, ...]
) -> None:
    done = encrypted.run(command, *encrypted.own)
    assert isinstance(done.exception, Unavailable), done.output
    assert "CERTIFICATE_VERIFY_FAILED" in str(done.exception)
    assert "give --ca" in str(done.exception)


def test_a_certificate_of_another_name_is_not_trusted(encrypted: Encrypted) -> None:
    done = encrypted.run(("why", "x"), *encrypted.ca, *encrypted.own, host="localhost")
    assert isinstance(done.exception, Unavailable), done.output
    assert "not valid for 'localhost'" in str(done.exception)
    assert "name of the certificate" in str(done.exception)


def test_a_health_check_without_a_certificate_counts_as_healthy(encrypted: Encrypted) -> None:
    """Such a node was never ready: since TLS 1.3, a server refuses a client after the client's handshake."""
    assert health_status(f"https://127.0.0.1:{encrypted.port}", 30.0) == 200
    assert health_status(f"https://127.0.0.1:{free_port()}", 30.0) is None


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_without_a_certificate_the_gateway_lets_nobody_in(encrypted: Encrypted, command: tuple[str, ...]) -> None:
    done = encrypted.run(command, *encrypted.ca)
    assert isinstance(done.exception, Unavailable), done.output


def test_certificates_that_cannot_be_used_are_named(encrypted: Encrypted, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    for options in (("--ca", missing), ("--cert", missing, "--key", missing)):
        done = encrypted.run(("why", "x"), *options)
        assert isinstance(done.exception, ConfigurationError), done.output
        assert missing in str(done.exception)
    done = encrypted.run(("why", "x"), *encrypted.own[:2])
    assert "go together" in str(done.exception)
