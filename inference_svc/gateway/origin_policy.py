"""Protects a gateway without API keys from cross-site requests and DNS rebinding.

A gateway without keys serves everyone who can reach its address, and any web page can make the user's browser send
requests to that address. The policy recognizes such requests by headers that a page cannot forge: ``Origin``,
``Sec-Fetch-Site`` (https://www.w3.org/TR/fetch-metadata/) and ``Host``. After DNS rebinding, ``Host`` contains the
attacker's DNS name.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from inference_svc.gateway.gateway_config import GatewayConfig

# Only browsers send these headers, and a page's scripts cannot set them.
_FETCH_SITE, _FETCH_MODE, _FETCH_DEST = "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"
_JSON = "application/json"
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Refusal:
    """The refusal of a request. ``reason`` is the label of a metric; the sender gets ``message``."""

    reason: str
    message: str
    status: int = 403


# Ends of the names of Kubernetes' Services: NAME.NAMESPACE.svc, and the same with the usual domain of a cluster.
_SERVICE_NAMES = (".svc", ".svc.cluster.local")


class OriginPolicy:
    """Rules for one gateway's address and the hosts and origins that its operator allows."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = {"localhost", config.host.lower(), *config.hosts}
        self._any_host = "*" in config.hosts
        self._origins, self._any_origin = set(config.origins), "*" in config.origins
        if not config.for_this_machine:
            self._hosts.add(socket.gethostname().lower())
        self._local_names = not config.for_this_machine

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return the refusal of an HTTP request, or None if the policy allows it."""
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host and not self._is_own(_name(host)):
            return Refusal(
                "host",
                f"the Host {host[:_LONGEST_SHOWN]!r} is none of this server's names; ask for localhost or an address, "
                f"or start the gateway with --allow-hosts",
            )
        origin = headers.get("origin")
        if origin is not None and not self._lets_in(origin, host):
            return Refusal(
                "origin",
                f"pages of {origin[:_LONGEST_SHOWN]!r} may not use this server; its gateway's --allow-origins can let "
                f"them in",
            )
        site = headers.get(_FETCH_SITE, "none")
        if origin is None and site not in ("same-origin", "none") and not _opens_page(scope, headers):
            return Refusal("site", "a page of another site sent this; pages of other sites may not use this server")
        of_browser = origin is not None or _FETCH_SITE in headers
        if of_browser and scope["method"] == "POST" and not _is_json(headers.get("content-type", "")):
            return Refusal("content_type", f"a browser's body must be of the Content-Type {_JSON}", 415)
        return None

    def _is_own(self, name: str) -> bool:
        """Return whether a host name is safe from DNS rebinding, or the operator allows it.

        Safe names are IP addresses and, beyond this machine, single-label names and those of Kubernetes' Services: an
        attacker's DNS server answers for none of them.
        """
        if self._any_host or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._local_names and ("." not in name or name.endswith(_SERVICE_NAMES))
        return True

    def _lets_in(self, origin: str, host: str) -> bool:
        if self._any_origin or origin in self._origins:
            return True
        return bool(host) and origin.lower().partition("://")[2] == host


def _name(host: str) -> str:
    """Return the host name of a Host header: without the port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether the request opens this server's web page, because a user followed a link to it."""
    asked = headers.get(_FETCH_MODE), headers.get(_FETCH_DEST)
    return scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and asked == ("navigate", "document")


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _JSON
