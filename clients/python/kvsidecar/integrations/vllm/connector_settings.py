"""Settings of the vLLM connector, from ``kv_connector_extra_config``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations import engine_options

log = logging.getLogger("vllm.kvsidecar")
_OLD_MIN_LOAD_TOKENS = "least_tokens"


@dataclass(frozen=True)
class ConnectorSettings(engine_options.DaemonOptions):
    """Settings of the connector, in addition to the daemon's address."""

    bits: int = 16
    """Bits per stored key or value: 16, 8 or 4."""
    chunk_tokens: int = 128
    """Minimum length of a chunk, in tokens."""
    timeout_ms: int = 500
    """Timeout of a call that transfers no payload."""
    min_load_tokens: int = 64
    """Minimum length of a load, in tokens. The engine computes the tokens of a shorter match."""
    share_across_machines: bool = False
    """Share chunks with engines on other machines and of other versions, whose keys and values may differ in bits."""
    reset_keeps_chunks: bool = False
    """Continue to use stored chunks after a reset of the connector: for engines that never change weights in place."""

    @property
    def timeout(self) -> float:
        return self.timeout_ms / 1000


def read_settings(given: Mapping[str, Any]) -> ConnectorSettings:
    """Parse the extra config. Raises ConfigurationError for an unknown name or a value out of range.

    ``least_tokens`` is the previous name of ``min_load_tokens``; this version still accepts it.
    """
    if _OLD_MIN_LOAD_TOKENS in given and "min_load_tokens" not in given:
        log.warning("least_tokens is now called min_load_tokens; the old name goes with the next version")
        given = {"min_load_tokens" if name == _OLD_MIN_LOAD_TOKENS else name: value for name, value in given.items()}
    return engine_options.parse_options(ConnectorSettings, given, "kv_connector_extra_config")
