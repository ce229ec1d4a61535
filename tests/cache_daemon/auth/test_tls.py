"""TLS files: refused by name at the start, read again when they change."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from kvsidecar.errors import ConfigurationError

from benchmarks.certificate_authority import CertificateAuthority, IssuedCertificate
from cache_daemon.auth.tls import TlsFiles, server_credentials
from tests.cache_daemon.auth.conftest import ALICE, Running


def test_files_that_cannot_be_used_are_refused_by_name(
    authority: CertificateAuthority, server_files: IssuedCertificate, tmp_path: Path
) -> None:
    other = authority.issue("other")
    text = tmp_path / "text"
    text.touch(0o600)
    text.write_text("no certificate")
    good = server_files
    server_credentials(TlsFiles(good.certificate, good.key, authority.ca))
    for files, message in (
        (TlsFiles(tmp_path / "none", good.key), f"cannot read the TLS file {tmp_path / 'none'}: No such file"),
        (TlsFiles(good.certificate, tmp_path / "none"), f"cannot read the TLS file {tmp_path / 'none'}"),
        (TlsFiles(good.certificate, good.key, tmp_path / "none"), f"cannot read the TLS file {tmp_path / 'none'}"),
        (TlsFiles(good.certificate, other.key), "other.key cannot be used together: key values mismatch"),
        (TlsFiles(text, good.key), "cannot be used together"),
        (TlsFiles(good.certificate, text), "cannot be used together"),
        (TlsFiles(good.certificate, good.key, text), f"the client CA {text} holds no certificates"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            server_credentials(files)
        assert message in str(caught.value)


def test_a_key_that_others_can_read_is_refused(server_files: IssuedCertificate) -> None:
    server_files.key.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"server.key is open to others; run: chmod o-rwx"):
        server_credentials(TlsFiles(server_files.certificate, server_files.key))


def test_a_key_with_a_password_is_refused_without_asking_for_it(server_files: IssuedCertificate) -> None:
    key = serialization.load_pem_private_key(server_files.key.read_bytes(), None)
    server_files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        server_credentials(TlsFiles(server_files.certificate, server_files.key))


async def served_certificate(running: Running, authority: CertificateAuthority) -> int:
    """The serial number of the certificate that the server shows to a new connection."""
    port = int(running.addresses[-1].rpartition(":")[2])
    pem = await asyncio.to_thread(
        ssl.get_server_certificate, ("127.0.0.1", port), ca_certs=str(authority.ca), timeout=10
    )
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tls: Running, authority: CertificateAuthority, server_files: IssuedCertificate, tmp_path: Path
) -> None:
    first = serial(server_files.certificate)
    assert await served_certificate(tls, authority) == first
    (tmp_path / "new").mkdir()
    authority._folder = tmp_path / "new"
    renewed = authority.issue("server", hosts=("localhost", "127.0.0.1"))
    shutil.copy(renewed.certificate, server_files.certificate)  # the key does not match yet
    assert await served_certificate(tls, authority) == first
    assert await tls.call("Whoami", token=ALICE, ca=authority.ca) == b"alice"
    shutil.copy(renewed.key, server_files.key)
    assert await served_certificate(tls, authority) == serial(renewed.certificate) != first
    server_files.key.unlink()
    assert await served_certificate(tls, authority) == serial(renewed.certificate)


@pytest.mark.parametrize(
    ("version", "spoken"),
    [(ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_1, None)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1:DeprecationWarning")
async def test_nothing_older_than_tls_1_2_is_spoken(
    tls: Running, authority: CertificateAuthority, version: ssl.TLSVersion, spoken: str | None
) -> None:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    port = int(tls.addresses[-1].rpartition(":")[2])
    opening = asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    if spoken is None:
        with pytest.raises(ConnectionResetError):  # with a server that speaks it, the same opening succeeds above
            await opening
        return
    _, writer = await opening
    assert writer.get_extra_info("ssl_object").version() == spoken
    writer.close()
