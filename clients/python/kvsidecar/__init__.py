"""KVSidecar's client side: the stubs, the key and chunk formats, the clients and the command line.

Imports neither torch nor the servers; both of them import this. ``paged`` and what ``integrations`` has of engines need
torch and the kernels, and nothing here imports them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsidecar.client import AsyncClient, Client, Completion, CompletionChunk
    from kvsidecar.errors import KVSidecarError

__all__ = ["AsyncClient", "Client", "Completion", "CompletionChunk", "KVSidecarError"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily: most of what imports a module of this package needs no client, which brings gRPC.
    if name in __all__:
        from kvsidecar import client, errors

        return getattr(errors if name == "KVSidecarError" else client, name)
    raise AttributeError(f"module 'kvsidecar' has no attribute {name!r}")
