"""KVSidecar's client library: gRPC stubs, key and chunk formats, clients, command line.

The servers import this package; it does not import the servers. Only ``kv_transfer`` and ``integrations`` import torch
and the kernels, and no other module imports these two packages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsidecar.client import AsyncClient, Client, Completion, CompletionChunk
    from kvsidecar.errors import KVSidecarError

__all__ = ["AsyncClient", "Client", "Completion", "CompletionChunk", "KVSidecarError"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    # Lazy: importing a client loads gRPC, and most importers of this package need no client.
    if name in __all__:
        from kvsidecar import client, errors

        return getattr(errors if name == "KVSidecarError" else client, name)
    raise AttributeError(f"module 'kvsidecar' has no attribute {name!r}")
