"""vLLM KV connector: the daemon stores vLLM's KV cache.

The cache survives restarts, and all engines of a node share it. ``--kv-transfer-config '{"kv_connector":
"KVSidecarConnector", "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_role": "kv_both"}'``; see
``docs/engines.md``. Only ``connector``, ``config_check``, ``worker_startup``, ``namespace_descriptor`` and
``vllm_metrics`` import vLLM.
"""

from typing import Any

__all__ = ["KVSidecarConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector lazily: it imports vLLM, and most modules of this package do not."""
    if name == "KVSidecarConnector":
        from kvsidecar.integrations.vllm.connector import KVSidecarConnector

        return KVSidecarConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
