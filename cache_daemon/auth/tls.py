"""Server TLS: certificate files, checked at start and reloaded when they change."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from kvsidecar.errors import ConfigurationError

log = structlog.get_logger("cache_daemon")


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files.

    With ``client_ca`` every client must present a certificate signed by it (mTLS).
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that check the files at every handshake.

    gRPC speaks TLS 1.2 and 1.3 only. If changed files are unusable, the log says so and the previous certificates stay
    in use. Raises ConfigurationError, with one sentence that names the file, when the files are unusable at the start.
    """
    reading = _Reading(files)
    return grpc.dynamic_ssl_server_credentials(
        reading.first,
        reading.changed,  # type: ignore[arg-type]  # gRPC takes None for "no change"; the stubs do not know
        require_client_authentication=files.client_ca is not None,
    )


class _Reading:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._signature()
        self.first = _read(files)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new file contents, or None when nothing changed.

        gRPC calls this on its own thread, one call at a time.
        """
        try:
            now = self._signature()
            if now == self._seen:
                return None
            found = _read(self._files)
        except ConfigurationError as error:
            log.error("the TLS files changed and cannot be used, those before hold", why=str(error))
            return None
        if self._signature() != now:  # the files changed while they were read: the next handshake reads them again
            return None
        self._seen = now
        log.info("the TLS files were read again")
        return found

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(path) for path in (self._files.certificate, self._files.key, self._files.client_ca) if path)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(f"cannot read the TLS file {path}: {error.strerror}") from error
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate, key = _content(files.certificate), _content(files.key)
    if os.stat(files.key).st_mode & stat.S_IRWXO:
        raise ConfigurationError(f"the TLS key {files.key} is open to others; run: chmod o-rwx {files.key}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the TLS certificate {files.certificate} and the key {files.key} cannot be used together: {_why(error)}"
        ) from error
    if files.client_ca is None:
        return grpc.ssl_server_certificate_configuration([(key, certificate)])
    authority = _content(files.client_ca)
    try:
        context.load_verify_locations(files.client_ca)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the client CA {files.client_ca} holds no certificates: {_why(error)}") from error
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read the TLS file {path}: {error.strerror}") from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else "they are no PEM, or the key has a password"
