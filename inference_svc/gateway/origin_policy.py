"""Protects a gateway without API keys from cross-site requests and DNS rebinding.

Without keys, a gateway trusts everyone who can reach its address, and a browser lets every page that it shows reach
that address. The policy recognizes such requests by headers that a page cannot forge: ``Origin`` and ``Sec-Fetch-Site``
(https://www.w3.org/TR/fetch-metadata/), and ``Host``, which contains the attacker's name after DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from inference_svc.gateway.gateway_config import GatewayConfig

# Headers that browsers send and scripts cannot set; other programs do not send them.
_FETCH_SITE, _FETCH_MODE, _FETCH_DEST = "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"
_JSON = "application/json"
_LONGEST_SHOWN = 80


@dataclass(frozen=True)
class Refusal:
    """A refused request: ``reason`` labels a metric, ``message`` is for the sender."""

    reason: str
    message: str
    status: int = 403


class OriginPolicy:
    """Rules for one gateway's address and the hosts and origins that its operator allows."""

    def __init__(self, config: GatewayConfig) -> None:
        self._hosts = {"localhost", config.host.lower(), *config.hosts}
        self._any_host = "*" in config.hosts
        self._origins, self._any_origin = set(config.origins), "*" in config.origins
        if not config.for_this_machine:
            self._hosts.add(socket.gethostname().lower())
        self._single_labels = not config.for_this_machine

    def refusal(self, scope: Scope) -> Refusal | None:
        """Return why an HTTP request is refused, or None."""
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
        """Return whether a host name cannot be under an attacker's control.

        An attacker's DNS cannot serve IP addresses, nor single-label names of a local network.
        """
        if self._any_host or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return self._single_labels and "." not in name
        return True

    def _lets_in(self, origin: str, host: str) -> bool:
        if self._any_origin or origin in self._origins:
            return True
        return bool(host) and origin.lower().partition("://")[2] == host


def _name(host: str) -> str:
    """Return a Host without its port, and an IPv6 address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """Return whether a user follows a link to this server's own page.

    That is a top-level navigation.
    """
    asked = headers.get(_FETCH_MODE), headers.get(_FETCH_DEST)
    return scope["path"] == "/" and scope["method"] in ("GET", "HEAD") and asked == ("navigate", "document")


def _is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _JSON
