"""Chunk payloads in host or device memory, and their target slots in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.device.device_port import Event

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
    convention: channel i pairs with channel ``i + rotary_dim / 2``. Only ``layers`` get the tokens; None: all layers.
    """

    header: ChunkHeader
    payload: Payload
    slots: Tensor
    rotation: tuple[Array, Array] | None = None
    layers: frozenset[int] | None = None

    def runs_in(self, group: range) -> list[range]:
        """Return the runs of adjacent layers of a group that get the tokens."""
        if self.layers is None:
            return [group]
        runs: list[range] = []
        for layer in group:
            if layer not in self.layers:
                continue
            if runs and runs[-1].stop == layer:
                runs[-1] = range(runs[-1].start, layer + 1)
            else:
                runs.append(range(layer, layer + 1))
        return runs


@dataclass(frozen=True)
class LoadedLayers:
    """Layers that the pool contains; with ``ready``, from that event of the device on."""

    layers: range
    ready: Event | None = None

    def wait(self) -> None:
        """Block the calling thread until the pool contains the layers."""
        if self.ready is not None:
            self.ready.synchronize()
