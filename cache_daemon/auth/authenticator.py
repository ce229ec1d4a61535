"""Authenticates callers by bearer token, client certificate or Unix peer credentials."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from kvsidecar.errors import Context, Unauthenticated

from cache_daemon.auth.principal import Principal
from cache_daemon.auth.tenants_table import TenantsTable

PrincipalResolver = Callable[[Context], Principal]
"""Finds the principal of a call; raises Unauthenticated. Each listener has its own."""

_SCHEME = "bearer "

log = structlog.get_logger("cache_daemon")


class Authenticator:
    """Principal resolver of a TLS listener.

    If the caller sends a token, the token alone decides: a wrong token is refused even with a valid certificate.
    Without a token the certificate decides, by its common name and its DNS and URI alternative names. With ``guests``,
    the owner of an unknown certificate becomes a guest; this is for a listener without a tenants file.
    """

    def __init__(self, tenants: Callable[[], TenantsTable], *, guests: bool) -> None:
        self._tenants, self._guests = tenants, guests

    def principal_of(self, context: Context) -> Principal:
        """Resolve the caller from the current tenants table.

        A repeated call during a long RPC notices revoked tokens and certificates. Raises Unauthenticated.
        """
        sent = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        return self._by_token(sent) if sent else self._by_certificate(context)

    def _by_token(self, sent: list[str]) -> Principal:
        if len(sent) > 1 or not sent[0].lower().startswith(_SCHEME):
            raise Unauthenticated("the authorization metadata cannot be read; send it once, as: Bearer TOKEN")
        found = self._tenants().by_token(sent[0][len(_SCHEME) :].strip())
        if found is None:
            raise Unauthenticated("the token is not known here; send one whose hash the tenants file has")
        return found

    def _by_certificate(self, context: Context) -> Principal:
        names = certificate_names(context)
        if not names:
            raise Unauthenticated("the call names no tenant; send the metadata authorization: Bearer TOKEN")
        found = self._tenants().by_certificate(names)
        if found is None and self._guests:
            return Principal(names[0], tenants=None)
        if found is None:
            raise Unauthenticated(
                "the client's certificate has no name that the tenants file has; add one of its names there, or send "
                "the metadata authorization: Bearer TOKEN"
            )
        return found


def certificate_names(context: Context) -> list[str]:
    """Return common name, DNS and URI names of the verified client certificate; empty without one."""
    found = context.auth_context()
    values = [value for key in ("x509_common_name", "peer_dns", "peer_uri") for value in found.get(key, ())]
    return list(dict.fromkeys(value.decode("utf-8", "replace") for value in values if value))


class RefusalLog:
    """Rate-limited log of refused callers.

    Logs at most one line per second, with the number of refusals since the last line. Never logs credentials.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next, self._refused = clock, float("-inf"), 0

    def note(self, peer: str, method: str, error: Unauthenticated) -> None:
        self._refused += 1
        now = self._clock()
        if now < self._next:
            return
        log.warning("a caller was refused", peer=peer, method=method, why=str(error), refused=self._refused)
        self._next, self._refused = now + 1.0, 0


_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class PeerCredentials:
    """Process, user and group of a Unix socket's peer at the time of its connection.

    A peer in a PID namespace that this process cannot see has pid 0.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Read SO_PEERCRED of a connected Unix socket (unix(7)).

    SO_PEERCRED names the process that connected; another process may have inherited or received the descriptor since.
    """
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def is_allowed(peer: PeerCredentials, owner: int) -> bool:
    """Return True when a peer is root or ``owner``."""
    return peer.uid in (0, owner)
