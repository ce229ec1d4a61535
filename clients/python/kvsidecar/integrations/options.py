"""Settings that an engine passes on from its command line, checked by name, and where the daemon is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from kvsidecar.errors import ConfigurationError
from kvsidecar.layout import KEY_GROUP_TOKENS
from kvsidecar.runtime import default_runtime_dir

T = TypeVar("T")


def read(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """A dataclass of texts and whole numbers from 1 on. ``where`` names the flag in messages. Raises ConfigurationError
    for what is unknown or out of range."""
    known: dict[str, type] = {f.name: type(f.default) for f in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"{where} has {name!r}; allowed are {', '.join(known)}")
        if type(value) is not known[name]:
            wanted = "text" if known[name] is str else "a whole number"
            raise ConfigurationError(f"{name} is {value!r}; it must be {wanted}")
        if isinstance(value, int) and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")
        if name == "bits" and value not in KEY_GROUP_TOKENS:
            raise ConfigurationError(f"bits is {value}; allowed are 16, 8 and 4")
    return kind(**given)


def daemon_socket(given: str) -> Path:
    """The daemon's private socket: what was given, or the environment says, or that of this user."""
    found = given or os.environ.get("KVSIDECAR_CACHE_SOCKET", "")
    return Path(found) if found else default_runtime_dir() / "cache.sock"
