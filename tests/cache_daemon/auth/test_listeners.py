"""Who comes in at which door, and as whom."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.errors import ConfigurationError, PermissionDenied, Unauthenticated, Unavailable
from kvsidecar.net.channel import explain_unavailable
from kvsidecar.net.grpc_server import ListenerLimits

from benchmarks.certificate_authority import CertificateAuthority, IssuedCertificate
from tests.cache_daemon.auth.conftest import ADMIN, ALICE, BOB, Running, refused
from tests.cache_daemon.auth.echo import SERVICE

PRIVATE, SHARED, TCP = 0, 1, -1


# ---- Unix sockets ---------------------------------------------------------------------------------------------


async def test_the_private_socket_is_the_operators(start: Callable[..., Any], tmp_path: Path) -> None:
    running = await start()
    assert (tmp_path / "cache.sock").stat().st_mode & 0o777 == 0o600
    assert await running.call("Whoami") == b"operator"
    assert await running.call("Use", b"anybody's") == b"used"
    assert await running.call("Stats") == b"everything"


async def test_the_shared_socket_is_for_a_group_of_guests(start: Callable[..., Any], tmp_path: Path) -> None:
    running = await start(shared_socket=tmp_path / "shared.sock")
    found = (tmp_path / "shared.sock").stat()
    assert (found.st_mode & 0o777, found.st_gid) == (0o660, os.getgid())
    assert await running.call("Whoami", door=SHARED) == b"guest"
    assert await running.call("Use", b"a salt that it knows", door=SHARED) == b"used"
    await refused(running.call("Stats", door=SHARED), PermissionDenied)


async def test_a_socket_of_the_daemons_own_group_needs_no_chown(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter of system calls may forbid it."""

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", forbidden)
    running = await start(shared_socket=tmp_path / "shared.sock")
    assert await running.call("Whoami", door=SHARED) == b"guest"


async def test_a_socket_of_a_named_group_belongs_to_it(start: Callable[..., Any], tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give a socket to any group")
    await start(shared_socket=tmp_path / "shared.sock", socket_group="daemon")
    import grp

    assert (tmp_path / "shared.sock").stat().st_gid == grp.getgrnam("daemon").gr_gid


async def test_an_unknown_group_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no group 'nobody-has-this'"):
        await start(shared_socket=tmp_path / "shared.sock", socket_group="nobody-has-this")
    assert not (tmp_path / "cache.sock").exists(), "nothing is left of a start that failed"


async def test_a_shared_socket_that_others_could_replace_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o770)
    with pytest.raises(ConfigurationError, match="replace the socket"):
        await start(shared_socket=open_folder / "shared.sock")


# ---- tokens ---------------------------------------------------------------------------------------------------


async def test_a_token_names_its_tenant(tls: Running, authority: CertificateAuthority) -> None:
    assert await tls.call("Whoami", token=ALICE, ca=authority.ca) == b"alice"
    assert await tls.call("Use", b"salt-of-alice", token=ALICE, ca=authority.ca) == b"used"


async def test_a_token_does_not_open_another_tenant(tls: Running, authority: CertificateAuthority) -> None:
    for salt in (b"salt-of-bob", b"", b"salt-of-nobody"):
        text = await refused(tls.call("Use", salt, token=ALICE, ca=authority.ca), PermissionDenied)
        assert "salt-of" not in text
    assert await tls.call("Use", b"salt-of-bob", token=BOB, ca=authority.ca) == b"used"


async def test_an_operators_token_opens_everything(tls: Running, authority: CertificateAuthority) -> None:
    assert await tls.call("Use", b"salt-of-bob", token=ADMIN, ca=authority.ca) == b"used"
    assert await tls.call("Stats", token=ADMIN, ca=authority.ca) == b"everything"
    await refused(tls.call("Stats", token=ALICE, ca=authority.ca), PermissionDenied)


async def test_without_a_token_nothing_is_answered(tls: Running, authority: CertificateAuthority) -> None:
    assert "Bearer TOKEN" in await refused(tls.call("Whoami", ca=authority.ca), Unauthenticated)


@pytest.mark.parametrize(
    "sent",
    [
        "Bearer wrong-token",
        "Bearer ",
        "Bearer",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE} {ALICE}",
        f"Bearer {ALICE.upper()}",
    ],
)
async def test_a_wrong_token_is_refused_and_not_repeated(
    tls: Running, authority: CertificateAuthority, sent: str
) -> None:
    text = await refused(tls.call("Whoami", ca=authority.ca, metadata=[("authorization", sent)]), Unauthenticated)
    assert "wrong-token" not in text
    assert "alice" not in text.lower()


async def test_two_tokens_at_once_are_refused(tls: Running, authority: CertificateAuthority) -> None:
    sent = [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {BOB}")]
    assert "once" in await refused(tls.call("Whoami", ca=authority.ca, metadata=sent), Unauthenticated)


async def test_a_revoked_token_ends_open_streams_that_ask_again(
    tls: Running, authority: CertificateAuthority, tenants_file: Path
) -> None:
    channel = await tls.channel(token=ALICE, ca=authority.ca)
    call = channel.stream_stream(f"/{SERVICE}/Both")(timeout=10)
    await call.write(b"beat")
    assert await call.read() == b"beat"
    tenants_file.write_text(tenants_file.read_text().replace("[tenant.alice]", "[tenant.carol]"))
    assert tls.tenants.reload()
    await call.write(b"beat")
    assert await call.read() == b"beat", "the token is carol's now"
    tenants_file.write_text('[tenant.bob]\nsalt = "salt-of-bob"\n')
    assert tls.tenants.reload()
    await call.write(b"beat")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- certificates ---------------------------------------------------------------------------------------------


async def test_a_certificate_names_its_tenant(mtls: Running, authority: CertificateAuthority) -> None:
    alice = authority.issue("alice")
    way = {"ca": authority.ca, "certificate": alice.certificate, "key": alice.key}
    assert await mtls.call("Whoami", **way) == b"alice"
    assert await mtls.call("Use", b"salt-of-alice", **way) == b"used"
    await refused(mtls.call("Use", b"salt-of-bob", **way), PermissionDenied)


async def test_a_certificates_uri_names_its_tenant(mtls: Running, authority: CertificateAuthority) -> None:
    pod = authority.issue("pod-7", uris=("spiffe://there/alice",))
    assert await mtls.call("Whoami", ca=authority.ca, certificate=pod.certificate, key=pod.key) == b"alice"


async def test_a_certificate_that_no_tenant_names_is_refused(mtls: Running, authority: CertificateAuthority) -> None:
    mallory = authority.issue("mallory")
    way = {"ca": authority.ca, "certificate": mallory.certificate, "key": mallory.key}
    assert "no name" in await refused(mtls.call("Whoami", **way), Unauthenticated)
    assert await mtls.call("Whoami", token=BOB, **way) == b"bob", "a token says more than the certificate"


async def test_a_wrong_token_is_not_mended_by_a_certificate(mtls: Running, authority: CertificateAuthority) -> None:
    alice = authority.issue("alice")
    way = {"ca": authority.ca, "certificate": alice.certificate, "key": alice.key}
    await refused(mtls.call("Whoami", token="wrong", **way), Unauthenticated)


async def test_without_a_certificate_the_handshake_fails(mtls: Running, authority: CertificateAuthority) -> None:
    await refused(mtls.call("Whoami", ca=authority.ca, token=ALICE), Unavailable)


async def test_a_certificate_of_another_authority_fails(
    mtls: Running, authority: CertificateAuthority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    alice = CertificateAuthority(tmp_path / "other", "other").issue("alice")
    way = {"ca": authority.ca, "certificate": alice.certificate, "key": alice.key}
    await refused(mtls.call("Whoami", token=ALICE, **way), Unavailable)


@pytest.mark.parametrize("days", [(-3, -1), (1, 3)], ids=["expired", "not yet valid"])
async def test_a_certificate_out_of_its_days_fails(
    mtls: Running, authority: CertificateAuthority, days: tuple[int, int]
) -> None:
    alice = authority.issue("alice", from_day=days[0], to_day=days[1])
    await refused(mtls.call("Whoami", ca=authority.ca, certificate=alice.certificate, key=alice.key), Unavailable)


async def test_a_client_does_not_talk_to_a_server_of_another_authority(tls: Running, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    await refused(tls.call("Whoami", token=ALICE, ca=CertificateAuthority(tmp_path / "other", "other").ca), Unavailable)


async def test_without_a_tenants_file_a_certificate_is_a_guests(
    start: Callable[..., Any], authority: CertificateAuthority, server_files: IssuedCertificate
) -> None:
    running = await start(
        tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tls_client_ca=authority.ca
    )
    zoe = authority.issue("zoe")
    way = {"ca": authority.ca, "certificate": zoe.certificate, "key": zoe.key}
    assert await running.call("Whoami", **way) == b"zoe"
    assert await running.call("Use", b"a salt that zoe knows", **way) == b"used"
    await refused(running.call("Stats", **way), PermissionDenied)


async def test_a_door_that_nobody_can_pass_is_refused(
    start: Callable[..., Any], server_files: IssuedCertificate, tenants_file: Path
) -> None:
    tenants_file.write_text('[tenant.alice]\nsalt = "salt-of-alice"\ncertificates = ["alice"]\n')
    with pytest.raises(ConfigurationError, match="nobody could come in"):
        await start(
            tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tenants=tenants_file
        )


# ---- plain TCP ------------------------------------------------------------------------------------------------


async def test_insecure_tcp_serves_guests(start: Callable[..., Any]) -> None:
    running = await start(tcp="127.0.0.1:0", tcp_insecure=True)
    assert await running.call("Whoami") == b"guest"
    await refused(running.call("Stats"), PermissionDenied)


async def test_plain_tcp_at_a_tls_port_fails_and_disturbs_nobody(tls: Running, authority: CertificateAuthority) -> None:
    friend = await tls.channel(token=ALICE, ca=authority.ca)
    call = friend.stream_stream(f"/{SERVICE}/Both")(timeout=20)
    for _ in range(3):
        await refused(tls.call("Whoami"), Unavailable)
        await call.write(b"still here")
        assert await call.read() == b"still here"
    call.cancel()


async def test_who_forgot_tls_is_told_so(tls: Running) -> None:
    await forgets_tls(tls)


async def test_who_forgot_tls_is_told_so_where_certificates_are_asked_for(mtls: Running) -> None:
    await forgets_tls(mtls)


async def forgets_tls(running: Running) -> None:
    address, closed = running.addresses[TCP], Unavailable("Socket closed")
    told = await asyncio.to_thread(explain_unavailable, closed, address, encrypted=False)
    assert f"{address} speaks TLS and was called without" in str(told)
    assert explain_unavailable(closed, address, encrypted=True) is closed


async def test_another_failure_is_not_blamed_on_tls(start: Callable[..., Any]) -> None:
    running = await start(tcp="127.0.0.1:0", tcp_insecure=True)
    failed = Unavailable("Socket closed")
    for target in (running.addresses[TCP], running.addresses[PRIVATE], "127.0.0.1:1"):
        assert await asyncio.to_thread(explain_unavailable, failed, target, encrypted=False) is failed
    other = Unauthenticated("no")
    assert explain_unavailable(other, running.addresses[TCP], encrypted=False) is other


async def test_who_says_nothing_is_shown_out(
    start: Callable[..., Any], server_files: IssuedCertificate, tenants_file: Path
) -> None:
    running = await start(
        ListenerLimits(handshake_seconds=0.3),
        tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tenants=tenants_file,
    )  # fmt: skip
    port = int(running.addresses[TCP].rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_connections_beyond_the_limit_are_closed(
    start: Callable[..., Any], authority: CertificateAuthority, server_files: IssuedCertificate, tenants_file: Path
) -> None:
    running = await start(
        ListenerLimits(connections=4),
        tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tenants=tenants_file,
    )  # fmt: skip
    port = int(running.addresses[TCP].rpartition(":")[2])
    assert await closed_of([socket.create_connection(("127.0.0.1", port)) for _ in range(8)], 4) == 4
    private = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    for connection in private:
        connection.connect(running.addresses[PRIVATE].removeprefix("unix:"))
    assert await closed_of(private, 0) == 0, "the owner's connections are not counted"


async def closed_of(connections: list[socket.socket], expected: int) -> int:
    """How many of these the other side has closed, half a second after so many are; closes all."""
    closed: set[socket.socket] = set()

    def look() -> int:
        for connection in connections:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                with contextlib.suppress(ConnectionError):
                    while connection.recv(4096):  # HTTP/2's greeting
                        pass
                closed.add(connection)
        return len(closed)

    deadline = asyncio.get_running_loop().time() + 20
    while look() < expected and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    look()
    for connection in connections:
        connection.close()
    return len(closed)


# ---- health and reflection ------------------------------------------------------------------------------------


async def test_health_answers_at_all_doors(
    start: Callable[..., Any],
    authority: CertificateAuthority,
    server_files: IssuedCertificate,
    tenants_file: Path,
    tmp_path: Path,
) -> None:
    running = await start(
        shared_socket=tmp_path / "shared.sock",
        tcp="127.0.0.1:0", tls_cert=server_files.certificate, tls_key=server_files.key, tenants=tenants_file,
    )  # fmt: skip
    for door, way in ((PRIVATE, {}), (SHARED, {}), (TCP, {"ca": authority.ca})):
        channel = await running.channel(door, **way)
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            found = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert found.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "method",
    [
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        f"{SERVICE}/Both",
        f"{SERVICE}/Down",
    ],
)
async def test_everything_but_the_health_check_asks_who_calls(
    tls: Running, authority: CertificateAuthority, method: str
) -> None:
    channel = await tls.channel(ca=authority.ca)
    call = channel.stream_stream(f"/{method}")(timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_can_be_watched_by_who_has_a_name(tls: Running, authority: CertificateAuthority) -> None:
    channel = await tls.channel(token=ALICE, ca=authority.ca)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
