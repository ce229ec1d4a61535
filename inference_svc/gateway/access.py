"""Who asks: by the key that comes with a request, or without keys by where it comes from."""

from __future__ import annotations

import enum
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import Scope

from inference_svc.gateway.config import GatewayConfig

_HERE = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Caller(enum.Enum):
    """A guest may use the model and sees what the salts open that it sends; an operator sees what all tenants use."""

    GUEST = "guest"
    OPERATOR = "operator"


class Keys:
    """The gateway's keys."""

    def __init__(self, config: GatewayConfig) -> None:
        self._api, self._operator = config.api_key.get_secret_value(), config.operator_key.get_secret_value()

    def caller(self, scope: Scope) -> Caller | None:
        """Who sent an HTTP request; None for one whose key is missing or wrong."""
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if self._operator and _equal(given, self._operator):
            return Caller.OPERATOR
        if self._api:
            return Caller.GUEST if _equal(given, self._api) else None
        return Caller.OPERATOR if not self._operator and _from_here(scope, headers) else Caller.GUEST


def _equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


def _from_here(scope: Scope, headers: Headers) -> bool:
    """Whether a request was sent on this machine, to this machine by name: not handed on by a proxy, nor by a page of
    another site whose name was made to lead here."""
    if "forwarded" in headers or "x-forwarded-for" in headers:
        return False
    host = headers.get("host", "").lower()
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    try:
        return name in _HERE and ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False
