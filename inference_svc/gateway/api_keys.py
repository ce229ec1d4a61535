"""API keys: authenticates requests by key, or without a key by the user of the sending process."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Hashable

import structlog
from kvsidecar.errors import ConfigurationError, PermissionDenied
from kvsidecar.tenants_file import find_by_token
from starlette.datastructures import Headers
from starlette.types import Scope

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.peer_uid import user_of
from inference_svc.gateway.tenant_keys import TenantKey, load_tenants

GUEST_HEADER = "x-kvsidecar-guest"
"""Header that a fleet gateway adds to a guest's request.

The fleet gateway sends all requests with its own key, which a node would take for an operator's.
"""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})

log = structlog.get_logger("gateway")


class ApiKeys:
    """The gateway's API keys.

    A guest may use the model and see the cache usage of the salts in its requests. An operator sees the usage of all
    tenants.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Read the keys. Raises ConfigurationError for an unusable tenants file."""
        self._api, self._operator = config.api_key.get_secret_value(), config.operator_key.get_secret_value()
        self._file = config.tenants
        self._tenants = {} if self._file is None else load_tenants(self._file)
        self._any = bool(self._api or self._operator or self._tenants)
        self._local_operator = config.local_operator and config.for_this_machine and not self._any

    def reload(self) -> bool:
        """Read the tenants file again, at SIGHUP.

        If the file is unusable, the method logs the reason, keeps the current keys, and returns False.
        """
        if self._file is None:
            return True
        try:
            self._tenants = load_tenants(self._file)
        except ConfigurationError as error:
            log.error("the tenants file cannot be read; the one read before stays in use", why=str(error))
            return False
        log.info("the tenants file was read again")
        return True

    @property
    def open(self) -> bool:
        """Return whether the gateway accepts requests without a key."""
        return not (self._api or self._tenants)

    @property
    def has_tenants(self) -> bool:
        return bool(self._tenants)

    def is_authorized(self, scope: Scope) -> bool:
        """Return whether an HTTP request has a valid key, or the gateway needs no key."""
        if self.open:
            return True
        given = _sent_key(Headers(scope=scope))
        if _equal(given, self._api) or _equal(given, self._operator):
            return True
        return self._tenant(given) is not None

    def salt(self, scope: Scope, asked: str) -> str:
        """Return the salt for a request that asks for the salt ``asked``.

        A tenant's key may use only the tenant's own salts. Every other caller, and an operator's key, gets ``asked``.

        Raises PermissionDenied, InvalidRequest.
        """
        given = _sent_key(Headers(scope=scope))
        found = self._tenant(given)
        if found is not None:
            return found.salt(asked)
        if self._tenants and not (_equal(given, self._api) or _equal(given, self._operator)):
            raise PermissionDenied("your API key was withdrawn while the request was read")
        return asked

    def tenant(self, scope: Scope) -> Hashable:
        """Return the owner of the conversations that a request may continue.

        The owner is the tenant of the request's key, "operator" for the operator key, and "" for all other callers.
        """
        given = _sent_key(Headers(scope=scope))
        return self._tenant(given) or ("operator" if _equal(given, self._operator) else "")

    def caller(self, scope: Scope) -> Hashable:
        """Return the owner of a request's byte budget: the tenant of its key, or else the client's address."""
        return self._tenant(_sent_key(Headers(scope=scope))) or (scope.get("client") or ("",))[0]

    def pinning_client(self, scope: Scope) -> str:
        """Return the client name under which the daemon counts the caller's pins; empty for an operator."""
        if self.is_operator(scope):
            return ""
        found = self._tenant(_sent_key(Headers(scope=scope)))
        if found is None:
            return "gateway guests"
        return f"gateway tenant {hashlib.blake2b(repr(found.salts).encode(), digest_size=16).hexdigest()}"

    def is_operator(self, scope: Scope) -> bool:
        """Return whether an operator sent a request.

        The method may query the kernel, so only handlers of rare requests call it.
        """
        headers = Headers(scope=scope)
        if GUEST_HEADER in headers:
            return False
        return self._is_operator_key(_sent_key(headers)) or (
            self._local_operator and _is_from_this_user(scope, headers)
        )

    def may_see_load(self, scope: Scope) -> bool:
        """Return whether the sender may see the load of all tenants together.

        Operators may see it. On a gateway without keys, every caller may, except a guest of a fleet.
        """
        headers = Headers(scope=scope)
        return GUEST_HEADER not in headers and (self._is_operator_key(_sent_key(headers)) or not self._any)

    def _is_operator_key(self, given: bytes) -> bool:
        if _equal(given, self._operator):
            return True
        tenant = self._tenant(given)
        return tenant is not None and tenant.operator

    def _tenant(self, given: bytes) -> TenantKey | None:
        """Return the tenant of a key, or None. Compares with all keys, so that the time reveals no match."""
        return find_by_token(self._tenants, given) if self._tenants else None


def _sent_key(headers: Headers) -> bytes:
    """Return the bearer token or, without one, the value of Anthropic's ``x-api-key``. It may be any bytes."""
    sent = headers.get("authorization", "")
    scheme, _, token = sent.partition(" ")
    if scheme.lower() == "bearer":
        sent = token.lstrip(" ")
    return (sent or headers.get("x-api-key", "")).encode("latin-1")


def _equal(given: bytes, key: str) -> bool:
    """Compare with a configured key in constant time. An empty ``key`` matches nothing."""
    return bool(key) and hmac.compare_digest(given, key.encode())


def _is_from_this_user(scope: Scope, headers: Headers) -> bool:
    """Return whether a process of the gateway's own user sent the request to a local host name.

    The check excludes proxies, by their user or their forwarding headers. It also excludes pages of other sites, even
    if their DNS name resolves to this machine.
    """
    if any(name in _PROXY_HEADERS or name.startswith("x-forwarded-") for name in headers):
        return False
    host = headers.get("host", "").lower()
    if headers.get("origin", f"//{host}").lower().partition("//")[2] != host:  # a page of another site sent it
        return False
    if (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in _LOCAL_HOSTS:
        return False
    peer, here = scope.get("client"), scope.get("server")
    try:
        if not (peer and here and all(ipaddress.ip_address(end[0]).is_loopback for end in (peer, here))):
            return False
    except ValueError:
        return False
    return user_of(tuple(peer), tuple(here)) == os.geteuid()
