"""vLLM KV connector: the daemon stores vLLM's KV cache.

The cache survives restarts of vLLM, and all engines of a node share it. Enable it with ``--kv-transfer-config
'{"kv_connector": "KVSidecarConnector", "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_role":
"kv_both"}'``; ``docs/engines.md`` has the details. Only the modules ``connector``, ``config_check``,
``worker_startup``, ``namespace_descriptor`` and ``vllm_metrics`` import vLLM.
"""

from typing import Any

__all__ = ["KVSidecarConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector at its first use, so that this package can be imported without vLLM."""
    if name == "KVSidecarConnector":
        from kvsidecar.integrations.vllm.connector import KVSidecarConnector

        return KVSidecarConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
