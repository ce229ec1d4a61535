"""Listeners of the daemon from its settings: private socket, shared socket, TCP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
from kvsidecar.errors import ConfigurationError, Context
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.net.grpc_server import Listener

from cache_daemon.auth.authenticator import Authenticator, PrincipalResolver
from cache_daemon.auth.interceptor import AuthInterceptor, InterceptorTimeouts
from cache_daemon.auth.principal import GUEST, OPERATOR, Principal
from cache_daemon.auth.tenants_table import TenantsTable
from cache_daemon.auth.tls import TlsFiles, server_credentials
from cache_daemon.config import DaemonConfig

AddServicer = Callable[[grpc.aio.Server, PrincipalResolver, Path | None], None]
"""Adds a servicer to a server.

The other arguments are the listener's principal resolver and the path of its Unix socket (None: TCP).
"""

MAX_EXTERNAL_MESSAGE_BYTES = 6 << 20
"""Longest message on external listeners: 2^20 tokens take at most 5 MiB."""
_MAX_EXTERNAL_STREAMS = 128
_HEARTBEATS = 4  # more than a session may miss, so that the session ends first and its own message reaches the client


def build_listeners(config: DaemonConfig, tenants: Callable[[], TenantsTable], add: AddServicer) -> list[Listener]:
    """Return the listeners that the settings configure, the private socket first.

    Raises ConfigurationError for unusable files.
    """
    found = [Listener(config.socket, partial(_add, add, _as_operator, config.socket))]
    timeouts = InterceptorTimeouts(
        stall_seconds=max(InterceptorTimeouts.stall_seconds, config.heartbeat_ms * _HEARTBEATS / 1000)
    )
    if config.shared_socket is not None:
        found.append(
            Listener(
                config.shared_socket,
                partial(_add, add, _as_guest, config.shared_socket),
                interceptors=(AuthInterceptor(_as_guest, timeouts),),
                group=config.socket_group,
                message_bytes=MAX_EXTERNAL_MESSAGE_BYTES,
                streams=_MAX_EXTERNAL_STREAMS,
            )
        )
    if config.tcp:
        resolve = _as_guest if config.tcp_insecure else _authenticator(config, tenants).principal_of
        found.append(
            Listener(
                parse_tcp(config.tcp),
                partial(_add, add, resolve, None),
                credentials=_credentials(config),
                interceptors=(AuthInterceptor(resolve, timeouts),),
                message_bytes=MAX_EXTERNAL_MESSAGE_BYTES,
                streams=_MAX_EXTERNAL_STREAMS,
            )
        )
    if config.health_tcp:
        found.append(Listener(parse_tcp(config.health_tcp), add=None))
    return found


def _authenticator(config: DaemonConfig, tenants: Callable[[], TenantsTable]) -> Authenticator:
    named = tenants()
    if config.tenants is not None and not (named.has_tokens or (config.tls_client_ca and named.has_certificates)):
        raise ConfigurationError(
            f"nobody could come in at --tcp {config.tcp}: no tenant in {config.tenants} has tokens"
            + (
                " or certificates; add some"
                if config.tls_client_ca
                else "; add some, or certificates and --tls-client-ca"
            )
        )
    return Authenticator(tenants, guests=config.tenants is None)


def _credentials(config: DaemonConfig) -> grpc.ServerCredentials | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_credentials(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))


def _add(add: AddServicer, resolver: PrincipalResolver, at: Path | None, server: grpc.aio.Server) -> None:
    add(server, resolver, at)


def _as_operator(_: Context) -> Principal:
    return OPERATOR


def _as_guest(_: Context) -> Principal:
    return GUEST
