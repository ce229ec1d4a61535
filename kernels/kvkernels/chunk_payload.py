"""Where a chunk's payload is, in memory that Python addresses or in a device's, and where its tokens go."""

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
    """Bytes at a device address, owned by whoever mapped them."""

    address: int
    size_bytes: int


Payload = memoryview | DeviceBytes


@dataclass(frozen=True)
class Piece:
    """The first ``len(slots)`` tokens of a chunk, and their int64 ``slots`` in the pool, on the CPU.

    ``rotation`` is the cosine and sine ``[rotary_dim / 2]`` (float32) of the angles by which keys are turned further,
    in float32, before they are rounded to the pool's dtype: ``RoPE`` in the rotate-half convention, channel i with
    channel ``i + rotary_dim / 2``.
    """

    header: ChunkHeader
    payload: Payload
    slots: Tensor
    rotation: tuple[Array, Array] | None = None
