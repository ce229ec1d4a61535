"""KV caches with many layouts, and an engine that writes them by its own, separate description of the layout."""

from __future__ import annotations

import itertools

import torch
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT16, DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry
from kvsidecar.kv_transfer.kv_layout import LayerKVLayout, PagedKVCache, strided_layout
from kvsidecar.kv_transfer.layout_selftest import Write
from torch import Tensor

TYPES = {
    torch.float32: DATA_TYPE_FLOAT32,
    torch.float16: DATA_TYPE_FLOAT16,
    torch.bfloat16: DATA_TYPE_BFLOAT16,
}
ORDERS = ["".join(order) for order in itertools.permutations("bthc")]
BLOCKS, BLOCK_TOKENS, HEADS, DIM, LAYERS = 5, 8, 2, 16, 3


def geometry(dtype: torch.dtype, bits: int = 16) -> Geometry:
    return Geometry(LAYERS, HEADS, DIM, TYPES[dtype], bits)


def apart(order: str, dtype: torch.dtype = torch.bfloat16, bits: int = 16) -> tuple[PagedKVCache, Write]:
    """Return a cache with separate tensors for keys and values; both have dimensions in this order."""
    sizes = {"b": BLOCKS, "t": BLOCK_TOKENS, "h": HEADS, "c": DIM}
    tensors = [[torch.zeros([sizes[d] for d in order], dtype=dtype) for _ in range(2)] for _ in range(LAYERS)]
    layers = tuple(LayerKVLayout(strided_layout(k, order), strided_layout(v, order)) for k, v in tensors)
    to = [order.index(d) for d in "bthc"]

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for tensor, given in zip(tensors[layer], (keys, values), strict=True):
            tensor.permute(to)[slots // BLOCK_TOKENS, slots % BLOCK_TOKENS] = given

    return PagedKVCache(order, geometry(dtype, bits), BLOCK_TOKENS, layers), write


def packed(dtype: torch.dtype = torch.bfloat16, bits: int = 16) -> tuple[PagedKVCache, Write]:
    """Return a cache with all layers in one allocation, blocks outermost, and a token's values after its keys."""
    whole = torch.zeros(BLOCKS, LAYERS, HEADS, BLOCK_TOKENS, 2 * DIM, dtype=dtype)
    views = [whole[:, layer] for layer in range(LAYERS)]
    layers = tuple(
        LayerKVLayout(strided_layout(v[..., :DIM], "bhtc"), strided_layout(v[..., DIM:], "bhtc")) for v in views
    )

    def write(layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        both = torch.cat((keys, values), -1)
        views[layer].transpose(1, 2)[slots // BLOCK_TOKENS, slots % BLOCK_TOKENS] = both

    return PagedKVCache("packed", geometry(dtype, bits), BLOCK_TOKENS, layers), write


def fill(write: Write, slots: Tensor, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Write random keys and values ``[layers, tokens, heads, channels]`` as the engine does; return them."""
    make = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, LAYERS, len(slots), HEADS, DIM, generator=make).to(dtype)
    for layer in range(LAYERS):
        write(layer, keys[layer], values[layer], slots)
    return keys, values
