"""Memory layout of a paged KV cache.

The engine declares the layout; it is never inferred from a shape. A layout gives, for one layer's keys or values, an
offset and the strides of blocks, tokens, heads and channels. An axis may be split into several modes, as in CuTe's
layouts: in the tiles of Intel's AMX the token axis is ``(n / 16, 16)`` with a stride for each mode. This covers every
order of dimensions, with keys and values in one tensor or in two. A cache that the layout cannot describe is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16, DATA_TYPE_FLOAT32, DataType
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import ConfigurationError

_DATA_TYPES: dict[torch.dtype, DataType.ValueType] = {
    torch.float32: DATA_TYPE_FLOAT32,
    torch.float16: DATA_TYPE_FLOAT16,
    torch.bfloat16: DATA_TYPE_BFLOAT16,
}


def data_type(dtype: torch.dtype) -> DataType.ValueType:
    """Return the chunk format's element type for a torch dtype. Raises ConfigurationError."""
    if dtype not in _DATA_TYPES:
        raise ConfigurationError(f"the KV cache is of {dtype}; allowed are {', '.join(map(str, _DATA_TYPES))}")
    return _DATA_TYPES[dtype]


Mode = tuple[int, int]
"""Extent and stride, the stride in elements."""
Axis = tuple[Mode, ...]
"""Modes from the outermost to the innermost: index ``i`` is split as a mixed-radix number."""


def extent(axis: Axis) -> int:
    return prod(size for size, _ in axis)


def offsets(axis: Axis) -> NDArray[np.int64]:
    """Return each index's offset from index 0, in elements: ``[extent]``."""
    out = np.zeros(1, np.int64)
    for size, stride in axis:
        out = (out[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return out


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's keys, or of its values, in an engine's memory.

    Element ``[block, token, head, channel]`` is at ``memory[offset + block * block_stride + o]``, where ``o`` is the
    sum of the offsets of token, head and channel. ``memory`` is any tensor of the cache's dtype that begins at offset
    0; only its storage is used, and the engine owns it.
    """

    memory: Tensor
    offset: int
    blocks: int
    block_stride: int
    token: Axis
    head: Axis
    channel: Axis

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return self.token, self.head, self.channel

    def flat_memory(self) -> Tensor:
        """Return the memory from element 0 to its end, in one dimension."""
        begin = self.memory.storage_offset() + self.offset
        room = self.memory.untyped_storage().nbytes() // self.memory.element_size() - begin
        return torch.as_strided(self.memory, (room,), (1,), begin)

    def offset_tables(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the offsets of a block's tokens, heads and channels, in elements."""
        token, head, channel = self.axes
        return offsets(token), offsets(head), offsets(channel)


def strided_layout(tensor: Tensor, order: str) -> KVLayout:
    """Return the layout of a tensor whose dimensions ``order`` names.

    ``order`` is a permutation of ``b t h c`` for block, token, head and channel. Raises ConfigurationError.
    """
    if sorted(order) != ["b", "c", "h", "t"] or tensor.ndim != 4:
        raise ConfigurationError(
            f"the order is {order!r} for {tensor.ndim} dimensions; it must name each of b, t, h and c once"
        )
    at = {name: i for i, name in enumerate(order)}
    axes: dict[str, Axis] = {name: ((tensor.shape[i], tensor.stride(i)),) for name, i in at.items()}
    return KVLayout(tensor, 0, tensor.shape[at["b"]], tensor.stride(at["b"]), axes["t"], axes["h"], axes["c"])


@dataclass(frozen=True)
class LayerKVLayout:
    """Layouts of a layer's keys and values."""

    keys: KVLayout
    values: KVLayout


@dataclass(frozen=True)
class PagedKVCache:
    """An engine's paged KV cache: its layers in order, all of one geometry.

    ``name`` is the layout's name in messages. Raises ConfigurationError when layers differ, or do not fit the geometry.
    """

    name: str
    geometry: Geometry
    block_tokens: int
    layers: tuple[LayerKVLayout, ...]

    def __post_init__(self) -> None:
        g = self.geometry
        if len(self.layers) != g.layers:
            raise ConfigurationError(f"the cache has {len(self.layers)} layers, its geometry says {g.layers}")
        expected = (self.block_tokens, g.kv_heads, g.head_dim)
        for i, layer in enumerate(self.layers):
            for what, layout in (("keys", layer.keys), ("values", layer.values)):
                found = (extent(layout.token), extent(layout.head), extent(layout.channel))
                if found != expected:
                    raise ConfigurationError(
                        f"a block of layer {i}'s {what} has {found} tokens, heads and channels; expected is {expected}"
                    )
                if layout.memory.dtype != self.dtype or layout.memory.device != self.device:
                    raise ConfigurationError(
                        f"layer {i}'s {what} are {layout.memory.dtype} on {layout.memory.device}, layer 0's are "
                        f"{self.dtype} on {self.device}; all must be alike"
                    )
                _check_bounds(i, what, layout)
                first = self.layers[0].keys if what == "keys" else self.layers[0].values
                if (layout.block_stride, *layout.axes) != (first.block_stride, *first.axes):
                    raise ConfigurationError(f"layer {i}'s {what} are laid out otherwise than layer 0's")

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].keys.memory.dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.memory.device

    @property
    def blocks(self) -> int:
        return min(min(layer.keys.blocks, layer.values.blocks) for layer in self.layers)


def _check_bounds(layer: int, what: str, layout: KVLayout) -> None:
    """Refuse a layout whose offsets leave the memory, since kernels write unchecked."""
    axes = (*layout.token, *layout.head, *layout.channel, (layout.blocks, layout.block_stride))
    first = layout.memory.storage_offset() + layout.offset
    last = first + sum((size - 1) * stride for size, stride in axes)
    room = layout.memory.untyped_storage().nbytes() // layout.memory.element_size()
    if min((stride for _, stride in axes), default=0) < 0 or first < 0 or last >= room:
        raise ConfigurationError(f"layer {layer}'s {what} reach to element {last} of a memory of {room}")
