"""LMCache's second level (its multiprocess server's L2), kept by the daemon.

``--l2-adapter '{"type": "plugin", "module_path": "kvsidecar.integrations.lmcache", "class_name":
"KVSidecarL2Adapter"}'``; ``docs/engines.md`` says the rest. Only ``adapter`` imports LMCache.
"""

from typing import Any

__all__ = ["KVSidecarL2Adapter"]


def __getattr__(name: str) -> Any:
    """The adapter imports LMCache, and not everything here does."""
    if name == "KVSidecarL2Adapter":
        from kvsidecar.integrations.lmcache.adapter import KVSidecarL2Adapter

        return KVSidecarL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
