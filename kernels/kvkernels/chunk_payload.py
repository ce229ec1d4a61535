"""Chunk payloads in host or device memory, and their target slots in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes at a device address. The mapping's creator owns them."""

    address: int
    size_bytes: int


Payload = memoryview | DeviceBytes


@dataclass(frozen=True)
class ChunkPlacement:
    """First ``len(slots)`` tokens of a chunk and their slots in the pool.

    ``slots`` are int64, on the CPU. ``rotation`` contains cosines and sines ``[rotary_dim / 2]`` (float32) of a RoPE
    shift. It is applied to the keys in float32, before they are rounded to the pool's dtype, in the rotate-half
    convention: channel i pairs with channel ``i + rotary_dim / 2``.
    """

    header: ChunkHeader
    payload: Payload
    slots: Tensor
    rotation: tuple[Array, Array] | None = None
