"""Parses ``host:port`` addresses and Unix socket paths."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TcpAddress:
    """A TCP server's address; an IPv6 host has brackets only in ``str()``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach the address. The only host name that counts is ``localhost``."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_tcp(text: str) -> TcpAddress:
    """Parse ``"127.0.0.1:7401"`` or ``"[::1]:7401"``; port 0 means any free port. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not colon or not host or (":" in host) != bracketed or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address; write it like 127.0.0.1:7401 or [::1]:7401")
    return TcpAddress(host, int(port))


def socket_path(target: str | Path) -> Path | None:
    """Return a target's Unix socket path; None for ``host:port``.

    A target is a socket path if it is a Path, or text that begins with ``/``, ``.`` or ``unix:``, or text without a
    colon.
    """
    if isinstance(target, Path):
        return target
    if target.startswith(("/", ".", "unix:")) or ":" not in target:
        return Path(target.removeprefix("unix:"))
    return None


def why_not_bindable(address: TcpAddress) -> str:
    """Return the system's reason why an address cannot be bound; empty when it can.

    gRPC itself reports only that binding failed. Another process may still take the port after this check.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{address.host!r} is no address of this machine: {error.strerror}"
    reasons: list[OSError] = []
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            reasons.append(error)
    if len(reasons) == len(found) or any(error.errno == errno.EADDRINUSE for error in reasons):
        return reasons[0].strerror or str(reasons[0])
    return ""
