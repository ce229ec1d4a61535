"""vLLM's KV cache, kept by the daemon: survives vLLM's restarts, and is shared by all engines of a node.

``--kv-transfer-config '{"kv_connector": "KVSidecarConnector", "kv_connector_module_path":
"kvsidecar.integrations.vllm", "kv_role": "kv_both"}'``; ``docs/engines.md`` says the rest.
"""

from typing import Any

__all__ = ["KVSidecarConnector"]


def __getattr__(name: str) -> Any:
    """The connector imports vLLM, and not everything here does."""
    if name == "KVSidecarConnector":
        from kvsidecar.integrations.vllm.connector import KVSidecarConnector

        return KVSidecarConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
