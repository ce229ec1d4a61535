"""What ``kv_connector_extra_config`` may say, and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations import engine_options


@dataclass(frozen=True)
class ConnectorSettings(engine_options.DaemonOptions):
    """Beside where the daemon is, ``bits`` how keys and values are stored, ``chunk_tokens`` how long a chunk is at
    least, ``timeout_ms`` how long a call that moves nothing may take, ``least_tokens`` how few are not worth a load.
    ``share_across_machines`` shares with engines of other machines and versions, whose bits may be others."""

    bits: int = 16
    chunk_tokens: int = 128
    timeout_ms: int = 500
    least_tokens: int = 64
    share_across_machines: bool = False

    @property
    def timeout(self) -> float:
        return self.timeout_ms / 1000


def read_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """Raises ConfigurationError for what is unknown or out of range."""
    return engine_options.parse_options(ConnectorSettings, given, "kv_connector_extra_config")
