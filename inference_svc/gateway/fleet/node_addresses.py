"""Parses the node addresses of ``--nodes``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvsidecar.net.addresses import TcpAddress

_BY_NAME = "dns+"
_FORM = "http://HOST:PORT, https://HOST:PORT, or dns+http://NAME:PORT for all addresses of a name"


@dataclass(frozen=True)
class NodeAddress:
    """Address of a node's gateway. With ``every``, each address that ``host`` resolves to is a node."""

    scheme: str
    host: str
    port: int
    every: bool = False

    def __str__(self) -> str:
        return f"{self.scheme}://{TcpAddress(self.host, self.port)}"

    @property
    def in_clear(self) -> bool:
        """Return whether requests to this address leave the machine unencrypted."""
        return self.scheme == "http" and not TcpAddress(self.host, self.port).loopback


def parse_node_addresses(text: str) -> list[NodeAddress]:
    """Parse a comma-separated list. Raises ValueError."""
    found = [_place(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError(f"name at least one node, as {_FORM}")
    twice = next((place for i, place in enumerate(found) if place in found[:i]), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice")
    return found


def _place(text: str) -> NodeAddress:
    if "@" in text:  # the address may contain a password, so the error does not quote it
        raise ValueError(f"a node has no name and password; write {_FORM}")
    every = text.startswith(_BY_NAME)
    try:
        parts = urlsplit(text.removeprefix(_BY_NAME))
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        if parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.username:
            host = None
    if not host or not port:
        raise ValueError(f"{text!r} is no node; write {_FORM}, without a path or a name and password")
    if every and _is_address(host):
        raise ValueError(f"{text!r} has no name to look up; leave out {_BY_NAME}")
    return NodeAddress(parts.scheme, host, port, every)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
