"""Between machines: whose certificates are taken, toward nodes and from clients."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from kvsidecar.errors import ConfigurationError

from benchmarks.certificate_authority import CertificateAuthority, IssuedCertificate
from benchmarks.node import free_port
from inference_svc.gateway.fleet.fleet_app import create_app
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.gateway_server import configured
from tests.inference_svc.gateway.fleet.peers import Peer, fleet_of, named


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


def demanding(authority: CertificateAuthority, issued: IssuedCertificate) -> ssl.SSLContext:
    """A server's, for clients with a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(issued.certificate, issued.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize(
    ("name", "known", "up"), [("nodes.test", True, 1), ("others.test", True, 0), ("nodes.test", False, 0)]
)
async def test_a_node_has_the_names_certificate_and_asks_for_the_gateways(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch, name: str, known: bool, up: int
) -> None:
    named("nodes.test", monkeypatch)
    node = Peer(tls=demanding(authority, authority.issue("node", hosts=(name,))))
    own = authority.issue("gateway")
    settings: dict[str, Any] = {"node_ca": authority.ca}
    if known:
        settings |= {"node_cert": own.certificate, "node_cert_key": own.key}
    async with (
        node.listening(),
        fleet_of(nodes=f"dns+https://nodes.test:{node.port}", **settings) as (client, fleet),
    ):
        assert len(fleet.discovery.alive) == up
        assert (await client.get("/health")).status_code == (200 if up else 503)


async def test_what_tls_refuses_behind_the_handshake_is_no_end_of_asking(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert, or what is no record, reaches who reads as TLS's own error and not as the HTTP client's."""
    named("nodes.test", monkeypatch)

    class Refusing(Peer):
        mended = False

        async def _serve(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
            if self.mended:
                await super()._serve(path, body, writer)
            else:
                os.write(writer.get_extra_info("socket").fileno(), bytes(64))
                await asyncio.sleep(0.1)  # closing says more, which would overtake it

    issued = authority.issue("node", hosts=("nodes.test",))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    node = Refusing(tls=context)
    async with (
        node.listening(),
        fleet_of(nodes=f"dns+https://nodes.test:{node.port}", node_ca=authority.ca) as (client, fleet),
    ):
        (seen,) = fleet.discovery.all
        assert not seen.alive
        assert "SSL" in seen.why
        assert (await client.get("/health")).status_code == 503
        node.mended = True
        async with asyncio.timeout(20):
            while not seen.alive:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        node.mended = False
        assert (await client.get("/v1/responses/resp_0")).status_code == 404


async def test_a_gateway_lets_in_who_has_a_certificate(authority: CertificateAuthority) -> None:
    server, own = authority.issue("server", hosts=("127.0.0.1",)), authority.issue("client")
    config = GatewayConfig(
        nodes="http://127.0.0.1:1", tls_cert=server.certificate, tls_key=server.key, tls_client_ca=authority.ca
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(configured(create_app(config), config))
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/version"
        trusting = ssl.create_default_context(cafile=authority.ca)
        knowing = ssl.create_default_context(cafile=authority.ca)
        knowing.load_cert_chain(own.certificate, own.key)
        async with httpx.AsyncClient(verify=knowing) as client:
            async with asyncio.timeout(20):
                while not running.started:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient(verify=trusting) as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.get(url)
        running.should_exit = True
        await serving


@pytest.mark.parametrize("role", ["tls", "node"])
def test_certificates_that_cannot_be_used_are_said(tmp_path: Path, role: str) -> None:
    missing = tmp_path / "missing.pem"
    key = {"tls": "tls_key", "node": "node_cert_key"}[role]
    config = GatewayConfig(nodes=f"http://127.0.0.1:{free_port()}", **{f"{role}_cert": missing, key: missing})
    with pytest.raises(ConfigurationError, match=r"cannot use the certificates.*missing\.pem"):
        configured(create_app(config), config)
