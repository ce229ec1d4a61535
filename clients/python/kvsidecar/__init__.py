"""KVSidecar's client side: the stubs, the key and chunk formats, the clients and the command line.

Imports neither torch nor the servers; both of them import this. ``paged`` and what ``integrations`` has of engines need
torch and the kernels, and nothing here imports them.
"""

from kvsidecar.client import AsyncClient, Client, Completion, CompletionChunk
from kvsidecar.errors import KVSidecarError

__all__ = ["AsyncClient", "Client", "Completion", "CompletionChunk", "KVSidecarError"]
__version__ = "0.1.0"
