"""Who asks: by the key that comes with a request, or without keys by the user whose process sent it."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Hashable

import structlog
from kvsidecar.errors import ConfigurationError, PermissionDenied
from kvsidecar.tenants_file import by_token
from starlette.datastructures import Headers
from starlette.types import Scope

from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.peer_uid import user_of
from inference_svc.gateway.tenant_keys import TenantKey, load_tenants

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PROXY_HEADERS = frozenset({"forwarded", "via", "x-real-ip"})

log = structlog.get_logger("gateway")


class ApiKeys:
    """The gateway's keys. A guest may use the model and sees what the salts open that it sends; an operator sees what
    all tenants use."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigurationError for a tenants file that cannot be used."""
        self._api, self._operator = config.api_key.get_secret_value(), config.operator_key.get_secret_value()
        self._file = config.tenants
        self._tenants = {} if self._file is None else load_tenants(self._file)
        self._any = bool(self._api or self._operator or self._tenants)
        self._local_operator = config.local_operator and config.for_this_machine and not self._any

    def reload(self) -> bool:
        """Reads the tenants file again, at SIGHUP. One that cannot be used is logged and changes nothing; then it
        returns False."""
        if self._file is None:
            return True
        try:
            self._tenants = load_tenants(self._file)
        except ConfigurationError as error:
            log.error("the tenants file was not read again, the one before holds", why=str(error))
            return False
        log.info("the tenants file was read again")
        return True

    @property
    def open(self) -> bool:
        """No key is asked for."""
        return not (self._api or self._tenants)

    @property
    def has_tenants(self) -> bool:
        return bool(self._tenants)

    def is_authorized(self, scope: Scope) -> bool:
        """Whether an HTTP request comes with a key that is asked for, or none is."""
        if self.open:
            return True
        given = _sent_key(Headers(scope=scope))
        if _equal(given, self._api) or _equal(given, self._operator):
            return True
        return self._tenant(given) is not None

    def salt(self, scope: Scope, asked: str) -> str:
        """The salt of an HTTP request that names one, or none: a tenant's own. Raises PermissionDenied,
        InvalidRequest."""
        given = _sent_key(Headers(scope=scope))
        found = self._tenant(given)
        if found is not None:
            return found.salt(asked)
        if self._tenants and not (_equal(given, self._api) or _equal(given, self._operator)):
            raise PermissionDenied("your API key was withdrawn while the request was read")
        return asked

    def tenant(self, scope: Scope) -> Hashable:
        """Whose the conversations are that an HTTP request may go on from: a key's tenant, or all without a tenant."""
        given = _sent_key(Headers(scope=scope))
        return self._tenant(given) or ("operator" if _equal(given, self._operator) else "")

    def caller(self, scope: Scope) -> Hashable:
        """Whose budget an HTTP request is on: a tenant's, or without one the address that it comes from."""
        return self._tenant(_sent_key(Headers(scope=scope))) or (scope.get("client") or ("",))[0]

    def is_operator(self, scope: Scope) -> bool:
        """Whether an operator sent an HTTP request. Asks the kernel where that decides; so it is for few paths."""
        headers = Headers(scope=scope)
        return self._is_operator_key(_sent_key(headers)) or (
            self._local_operator and _is_from_this_user(scope, headers)
        )

    def may_see_load(self, scope: Scope) -> bool:
        """Whether whoever sent an HTTP request may know how busy all together are: an operator, and everybody where no
        key keeps anybody apart."""
        return self._is_operator_key(_sent_key(Headers(scope=scope))) or not self._any

    def _is_operator_key(self, given: bytes) -> bool:
        if _equal(given, self._operator):
            return True
        tenant = self._tenant(given)
        return tenant is not None and tenant.operator

    def _tenant(self, given: bytes) -> TenantKey | None:
        """Whom a key names. All are compared, whichever it is."""
        return by_token(self._tenants, given) if self._tenants else None


def _sent_key(headers: Headers) -> bytes:
    """The key as it was sent, which may be any bytes."""
    return headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")


def _equal(given: bytes, key: str) -> bool:
    """Whether this is the key, where there is one."""
    return bool(key) and hmac.compare_digest(given, key.encode())


def _is_from_this_user(scope: Scope, headers: Headers) -> bool:
    """Whether a process of this one's user sent a request, to this machine by name: not a proxy that runs as a user of
    its own or says that it hands something on, nor a page of another site, even one whose name was made to
    lead here."""
    if any(name in _PROXY_HEADERS or name.startswith("x-forwarded-") for name in headers):
        return False
    host = headers.get("host", "").lower()
    if headers.get("origin", f"//{host}").lower().partition("//")[2] != host:  # a page of another site
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
