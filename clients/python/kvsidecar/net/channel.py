"""gRPC channels to KVSidecar's services: Unix socket, plain TCP, or TLS.

Over TLS, a client authenticates with a certificate or a token.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvsidecar.errors import ConfigurationError, KVSidecarError, Unavailable
from kvsidecar.net.addresses import parse_tcp, socket_path
from kvsidecar.net.grpc_server import CLIENT_KEEPALIVE, DIRECT
from kvsidecar.process.runtime_dir import socket_target

Options = Sequence[tuple[str, Any]]
_PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class _ChannelTarget:
    target: str
    credentials: grpc.ChannelCredentials | None
    options: list[tuple[str, Any]]


def channel(
    target: str | Path,
    *,
    token: str | None = None,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    options: Options = (),
) -> grpc.Channel:
    """Create a channel to the path of a Unix socket (see ``socket_path``) or to ``host:port``.

    ``ca``, ``certificate`` with ``key`` (PEM files) and ``token`` each imply TLS; without ``ca``, public authorities
    verify the server's certificate. The token is sent with every call, and never over a plain connection. ``options``
    override the keepalive options. The channel is not yet connected. Raises ConfigurationError for unreadable files,
    and for TLS or a token with a Unix socket.
    """
    target_options = _channel_target(target, token, ca, certificate, key, options)
    if target_options.credentials is None:
        return grpc.insecure_channel(target_options.target, options=target_options.options)
    return grpc.secure_channel(target_options.target, target_options.credentials, options=target_options.options)


@dataclass(frozen=True)
class ServiceAddress:
    """Address of a service and the credentials for it; see ``channel``.

    Files are read for every connection, so that renewed certificates and tokens take effect.
    """

    target: str | Path
    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def remote(
        cls,
        address: str,
        token_file: Path | None = None,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> ServiceAddress:
        """Create the address of a daemon at ``host:port``.

        Raises ConfigurationError for an invalid address, for unusable files, and for another host without TLS, because
        anyone who reads a tenant's salt on the network could use it.
        """
        try:
            place = parse_tcp(address)
        except ValueError as error:
            raise ConfigurationError(f"the cache daemon's address {error}") from error
        found = cls(str(place), token_file, ca, certificate, key)
        if not place.port:
            raise ConfigurationError(f"the cache daemon's address is {place}; a port from 1 is needed")
        if not found.encrypted and not place.loopback:
            raise ConfigurationError(
                f"the cache daemon at {place} is on another host, and without TLS everybody in between reads along; "
                "give the CA file that vouches for it, and a certificate with its key or a token file"
            )
        found.channel().close()
        return found

    @property
    def encrypted(self) -> bool:
        return any(part is not None for part in (self.token_file, self.ca, self.certificate, self.key))

    def channel(self, options: Options = ()) -> grpc.Channel:
        """Create a channel, not yet connected. Raises ConfigurationError."""
        token = read_token(self.token_file) if self.token_file is not None else None
        return channel(
            self.target, token=token, ca=self.ca, certificate=self.certificate, key=self.key, options=options
        )


def aio_channel(
    target: str | Path,
    *,
    token: str | None = None,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    options: Options = (),
) -> grpc.aio.Channel:
    """Create a channel for the running event loop; see ``channel``."""
    target_options = _channel_target(target, token, ca, certificate, key, options)
    if target_options.credentials is None:
        return grpc.aio.insecure_channel(target_options.target, options=target_options.options)
    return grpc.aio.secure_channel(target_options.target, target_options.credentials, options=target_options.options)


def explain_unavailable(
    error: KVSidecarError, target: str | Path, *, encrypted: bool, absent: str = ""
) -> KVSidecarError:
    """Return the error, or a clearer error for an unavailable target.

    If no server listens and ``absent`` is given, the result has this text. If the server speaks TLS and the call did
    not (gRPC reports "Socket closed"), the result suggests TLS. Opens a connection to find out, for at most 2 s.
    """
    if not isinstance(error, Unavailable):
        return error
    if absent and not listens(target):
        return Unavailable(absent)
    if encrypted or socket_path(target) is not None or not _speaks_tls(str(target)):
        return error
    return Unavailable(f"{target} speaks TLS and was called without; give its CA file, and a token or a certificate")


def listens(target: str | Path) -> bool:
    """Return whether a server accepts connections at a Unix socket or ``host:port``.

    Tries for at most 2 s; returns True when the answer is unknown.
    """
    path = socket_path(target)
    try:
        if path is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PROBE_SECONDS)
                probe.connect(str(path))
        else:
            address = parse_tcp(str(target))
            socket.create_connection((address.host, address.port), _PROBE_SECONDS).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _speaks_tls(target: str) -> bool:
    try:
        address = parse_tcp(target)
    except ValueError:
        return False
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    try:
        reached = socket.create_connection((address.host, address.port), _PROBE_SECONDS)
        with reached, anybody.wrap_socket(reached):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # only a TLS server sends alerts
    except OSError:
        return False


def read_token(path: Path) -> str:
    """Read the token in a file, without the line end. Raises ConfigurationError."""
    token = _read(path, "token file").decode("utf-8", "replace").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(f"the token file {path} holds no token; it must have one line of printable ASCII")
    return token


def _channel_target(
    target: str | Path, token: str | None, ca: Path | None, certificate: Path | None, key: Path | None, options: Options
) -> _ChannelTarget:
    encrypted = any(part is not None for part in (token, ca, certificate, key))
    given = dict(CLIENT_KEEPALIVE if encrypted else (*CLIENT_KEEPALIVE, DIRECT)) | dict(options)
    path = socket_path(target)
    if path is not None:
        if encrypted:
            raise ConfigurationError(
                f"a token and certificates are for TCP, {target} is a Unix socket; leave them out, or name host:port"
            )
        return _ChannelTarget(socket_target(path), None, list(given.items()))
    return _ChannelTarget(
        str(target), _credentials(token, ca, certificate, key) if encrypted else None, list(given.items())
    )


def _credentials(
    token: str | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> grpc.ChannelCredentials:
    if (certificate is None) != (key is None):
        raise ConfigurationError("a certificate and its key go together; give both or neither")
    tls = grpc.ssl_channel_credentials(
        root_certificates=_read(ca, "CA file") if ca is not None else None,
        private_key=_read(key, "key file") if key is not None else None,
        certificate_chain=_read(certificate, "certificate file") if certificate is not None else None,
    )
    if token is None:
        return tls
    return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read the {what} {path}: {error.strerror}") from error
