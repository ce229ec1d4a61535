"""SGLang's hierarchical cache, kept by the daemon: its third tier, behind GPU and host memory.

``--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":
"kvsidecar", "module_path": "kvsidecar.integrations.sglang", "class_name": "KVSidecarStorage", "interface_v1": 1}'``;
``docs/engines.md`` says the rest. Only ``storage`` imports SGLang.
"""

from typing import Any

__all__ = ["KVSidecarStorage"]


def __getattr__(name: str) -> Any:
    """The storage imports SGLang, and not everything here does."""
    if name == "KVSidecarStorage":
        from kvsidecar.integrations.sglang.storage import KVSidecarStorage

        return KVSidecarStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
