"""Kernels of the KV cache, chosen by device, each with a torch reference of the same signature.

Imports ``kvsidecar`` (the chunk layout), but no package of the servers.
"""

from kvkernels.chunk_payload import ChunkPlacement, DeviceBytes, LoadedLayers, Payload
from kvkernels.dispatch import implementations, pack_chunk, unpack_chunk, unpack_chunks

__all__ = [
    "ChunkPlacement",
    "DeviceBytes",
    "LoadedLayers",
    "Payload",
    "implementations",
    "pack_chunk",
    "unpack_chunk",
    "unpack_chunks",
]
