"""Connector options from an engine's command line, including the daemon's address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kvsidecar.chunk_layout import KEY_GROUP_TOKENS
from kvsidecar.errors import ConfigurationError
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.process.runtime_dir import own_runtime_dir

T = TypeVar("T")


def parse_options(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Build the dataclass ``kind``, whose fields are texts, booleans or integers above 0.

    ``where`` is the flag's name for error messages. Raises ConfigurationError for an unknown name or an invalid value.
    """
    known: dict[str, type] = {f.name: type(f.default) for f in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"{where} has {name!r}; allowed are {', '.join(known)}")
        if type(value) is not known[name]:
            wanted = {str: "text", bool: "true or false"}.get(known[name], "a whole number")
            raise ConfigurationError(f"{name} is {value!r}; it must be {wanted}")
        if type(value) is int and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")
        if name == "bits" and value not in KEY_GROUP_TOKENS:
            raise ConfigurationError(f"bits is {value}; allowed are 16, 8 and 4")
    return kind(**given)


@dataclass(frozen=True)
class DaemonOptions:
    """Address and credentials of the daemon.

    ``socket`` is the path of the daemon's socket, or ``host:port`` of a daemon on another host. If ``socket`` is empty,
    the engine uses the environment variable KVSIDECAR_CACHE_SOCKET, or else the default socket of its user. For another
    host, ``ca`` is the file of the authority that signed the daemon's certificate. The client authenticates itself
    with ``cert`` and ``key``, or with ``token_file``.
    """

    socket: str = ""
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def address(self) -> ServiceAddress:
        """The daemon's address. Raises ConfigurationError."""
        found = self.socket or os.environ.get("KVSIDECAR_CACHE_SOCKET", "")
        files = {name: getattr(self, name) for name in ("token_file", "ca", "cert", "key") if getattr(self, name)}
        if _is_tcp(found):
            token, ca, cert, key = (
                Path(files[name]) if name in files else None for name in ("token_file", "ca", "cert", "key")
            )
            return ServiceAddress.remote(found, token, ca, cert, key)
        if files:
            raise ConfigurationError(
                f"{' and '.join(files)} are for a daemon at host:port, and the socket is "
                f"{found or 'that of this user'}; leave them out, or set socket to host:port"
            )
        return ServiceAddress(Path(found) if found else own_runtime_dir() / "cache.sock")


def _is_tcp(text: str) -> bool:
    try:
        return "/" not in text and parse_tcp(text) is not None
    except ValueError:
        return False
