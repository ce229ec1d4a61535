"""What ``kv_connector_extra_config`` may say, and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError
from kvsidecar.layout import KEY_GROUP_TOKENS
from kvsidecar.runtime import default_runtime_dir


@dataclass(frozen=True)
class Settings:
    """``socket`` is the daemon's, ``bits`` how keys and values are stored, ``chunk_tokens`` how long a chunk is at
    least, ``timeout_ms`` how long a call that moves nothing may take, ``least_tokens`` how few are not worth a load."""

    socket: str = ""
    bits: int = 16
    chunk_tokens: int = 128
    timeout_ms: int = 500
    least_tokens: int = 64

    @property
    def timeout(self) -> float:
        return self.timeout_ms / 1000

    @property
    def path(self) -> Path:
        given = self.socket or os.environ.get("KVSIDECAR_CACHE_SOCKET", "")
        return Path(given) if given else default_runtime_dir() / "cache.sock"


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Raises ConfigurationError for what is unknown or out of range."""
    known = {field.name: str if field.name == "socket" else int for field in fields(Settings)}
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"kv_connector_extra_config has {name!r}; allowed are {', '.join(known)}")
        kind = known[name]
        if type(value) is not kind:
            raise ConfigurationError(f"{name} is {value!r}; it must be {'text' if kind is str else 'a whole number'}")
        if isinstance(value, int) and value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1")
    settings = Settings(**given)
    if settings.bits not in KEY_GROUP_TOKENS:
        raise ConfigurationError(f"bits is {settings.bits}; allowed are 16, 8 and 4")
    return settings
