"""SGLang HiCache storage backend: the daemon is the third tier, after GPU and host memory.

Enable it with ``--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvsidecar", "module_path": "kvsidecar.integrations.sglang", "class_name": "KVSidecarStorage",
"interface_v1": 1}'``; ``docs/engines.md`` has the details. Only the module ``storage`` imports SGLang.
"""

from typing import Any

__all__ = ["KVSidecarStorage"]


def __getattr__(name: str) -> Any:
    """Import the storage class at its first use, so that this package can be imported without SGLang."""
    if name == "KVSidecarStorage":
        from kvsidecar.integrations.sglang.hicache_storage import KVSidecarStorage

        return KVSidecarStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
