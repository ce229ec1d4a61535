"""LMCache L2 adapter: the daemon is the second level (L2) of LMCache's multiprocess server.

Enable it with ``--l2-adapter '{"type": "plugin", "module_path": "kvsidecar.integrations.lmcache", "class_name":
"KVSidecarL2Adapter"}'``; ``docs/engines.md`` has the details. Only the module ``adapter`` imports LMCache.
"""

from typing import Any

__all__ = ["KVSidecarL2Adapter"]


def __getattr__(name: str) -> Any:
    """Import the adapter at its first use, so that this package can be imported without LMCache."""
    if name == "KVSidecarL2Adapter":
        from kvsidecar.integrations.lmcache.adapter import KVSidecarL2Adapter

        return KVSidecarL2Adapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
