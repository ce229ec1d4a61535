"""Real servers on real sockets with real certificates, and callers with different credentials."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.errors import KVSidecarError, from_rpc
from kvsidecar.net.channel import aio_channel
from kvsidecar.net.grpc_server import ListenerLimits, serve_listeners
from kvsidecar.tenants_file import hash_token

from benchmarks.certificate_authority import CertificateAuthority, IssuedCertificate
from cache_daemon.auth.tenants_table import ReloadableTenantsTable
from cache_daemon.config import DaemonConfig
from cache_daemon.listeners import build_listeners
from tests.cache_daemon.auth.echo import SERVICE, add_echo

ALICE, BOB, ADMIN = "token-of-alice-0123456789", "token-of-bob-0123456789", "token-of-the-admin-0123456789"
TENANTS = f"""
[tenant.alice]
salt = "salt-of-alice"
tokens = ["{hash_token(ALICE)}"]
certificates = ["alice", "spiffe://there/alice"]
arena_bytes = "1MiB"

[tenant.bob]
salt = "salt-of-bob"
tokens = ["{hash_token(BOB)}"]

[tenant.admin]
operator = true
tokens = ["{hash_token(ADMIN)}"]
"""


def tenant_id(salt: bytes) -> bytes:
    return hashlib.sha256(b"tenant" + salt).digest()


@dataclass
class Running:
    """A running echo service behind the daemon's listeners."""

    addresses: list[str]
    tenants: ReloadableTenantsTable
    config: DaemonConfig
    stack: AsyncExitStack

    async def call(self, method: str, request: bytes = b"", *, door: int = -1, metadata: Any = (), **way: Any) -> bytes:
        """Make a unary call over a new connection. Raises KVSidecarError if it fails."""
        channel = await self.channel(door, **way)
        try:
            return bytes(
                await channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=10, metadata=list(metadata))
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from error
        finally:
            await channel.close()

    async def channel(self, door: int = -1, **way: Any) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return await self.stack.enter_async_context(aio_channel(self.addresses[door], options=options, **way))


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


@pytest.fixture
def server_files(authority: CertificateAuthority) -> IssuedCertificate:
    return authority.issue("server", hosts=("localhost", "127.0.0.1", "10.77.0.1"))


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.touch(0o600)
    path.write_text(TENANTS)
    return path


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Serve the echo service with these settings of the daemon, until the test ends."""
    async with AsyncExitStack() as stack:

        async def launch(limits: ListenerLimits | None = None, **settings: Any) -> Running:
            config = DaemonConfig(socket=tmp_path / "cache.sock", **settings)
            tenants = ReloadableTenantsTable(config.tenants, tenant_id)
            addresses = await stack.enter_async_context(
                serve_listeners(
                    SERVICE, build_listeners(config, tenants, add_echo), lambda: 0.0, limits or ListenerLimits()
                )
            )
            return Running(addresses, tenants, config, stack)

        yield launch


@pytest.fixture
async def tls(start: Callable[..., Any], server_files: IssuedCertificate, tenants_file: Path) -> Running:
    """A TCP listener with the server's TLS certificate; callers authenticate with tokens."""
    return await start(
        tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tenants=tenants_file
    )


@pytest.fixture
async def mtls(
    start: Callable[..., Any], authority: CertificateAuthority, server_files: IssuedCertificate, tenants_file: Path
) -> Running:
    """A TCP listener on which every client needs a certificate of the authority."""
    return await start(
        tcp="127.0.0.1:0",
        tls_cert=server_files.certificate,
        tls_key=server_files.key,
        tls_client_ca=authority.ca,
        tenants=tenants_file,
    )


async def refused(call: Any, error: type[KVSidecarError]) -> str:
    """Return the message of a call's refusal."""
    with pytest.raises(error) as caught:
        await call
    return str(caught.value)
