"""API keys: authenticates requests by key, else by the sending process's user."""

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
"""The fleet gateway sends a guest's request with the gateway's key and this header."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})

log = structlog.get_logger("gateway")


class ApiKeys:
    """The gateway's API keys.

    A guest may use the model, and sees the cache usage of the salts that it sends. An operator sees all tenants' usage.
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

        For an unusable file, logs it, changes nothing and returns False.
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
        """Return whether requests need no key."""
        return not (self._api or self._tenants)

    @property
    def has_tenants(self) -> bool:
        return bool(self._tenants)

    def is_authorized(self, scope: Scope) -> bool:
        """Return whether an HTTP request has a valid key, or needs none."""
        if self.open:
            return True
        given = _sent_key(Headers(scope=scope))
        if _equal(given, self._api) or _equal(given, self._operator):
            return True
        return self._tenant(given) is not None

    def salt(self, scope: Scope, asked: str) -> str:
        """Return the salt that a request may use: the requested one, or a tenant's own.

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

        This is its tenant, or "" for all other callers.
        """
        given = _sent_key(Headers(scope=scope))
        return self._tenant(given) or ("operator" if _equal(given, self._operator) else "")

    def caller(self, scope: Scope) -> Hashable:
        """Return the owner of a request's byte budget: its tenant, else its client address."""
        return self._tenant(_sent_key(Headers(scope=scope))) or (scope.get("client") or ("",))[0]

    def pinning_client(self, scope: Scope) -> str:
        """Return the name by which the daemon knows a client's share of the pins; empty for an operator."""
        if self.is_operator(scope):
            return ""
        found = self._tenant(_sent_key(Headers(scope=scope)))
        if found is None:
            return "gateway guests"
        return f"gateway tenant {hashlib.blake2b(repr(found.salts).encode(), digest_size=16).hexdigest()}"

    def is_operator(self, scope: Scope) -> bool:
        """Return whether an operator sent a request.

        May query the kernel, so it is for rare paths only.
        """
        headers = Headers(scope=scope)
        if GUEST_HEADER in headers:
            return False
        return self._is_operator_key(_sent_key(headers)) or (
            self._local_operator and _is_from_this_user(scope, headers)
        )

    def may_see_load(self, scope: Scope) -> bool:
        """Return whether the sender may see the total load.

        Operators may, and everyone on a gateway without keys.
        """
        return self._is_operator_key(_sent_key(Headers(scope=scope))) or not self._any

    def _is_operator_key(self, given: bytes) -> bool:
        if _equal(given, self._operator):
            return True
        tenant = self._tenant(given)
        return tenant is not None and tenant.operator

    def _tenant(self, given: bytes) -> TenantKey | None:
        """Return the tenant of a key. Compares with all keys, even after a match."""
        return find_by_token(self._tenants, given) if self._tenants else None


def _sent_key(headers: Headers) -> bytes:
    """Return the bearer token as it was sent, which may be any bytes; without one, Anthropic's ``x-api-key``."""
    sent = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
    return sent.encode("latin-1")


def _equal(given: bytes, key: str) -> bool:
    """Compare with a configured key in constant time; an empty one never matches."""
    return bool(key) and hmac.compare_digest(given, key.encode())


def _is_from_this_user(scope: Scope, headers: Headers) -> bool:
    """Return whether this process's own user sent a request to a local name.

    Excludes proxies (another user, or forwarding headers) and pages of other sites, also pages whose DNS name resolves
    to this machine.
    """
    if any(name in _PROXY_HEADERS or name.startswith("x-forwarded-") for name in headers):
        return False
    host = headers.get("host", "").lower()
    if headers.get("origin", f"//{host}").lower().partition("//")[2] != host:  # sent by another site's page
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
