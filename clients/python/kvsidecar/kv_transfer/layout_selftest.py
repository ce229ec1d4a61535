"""Layout self-test: a round trip of marked values through the engine's own writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kvkernels.device.visible_devices import device_of, is_device
from numpy.typing import NDArray
from torch import Tensor

from kvsidecar.chunk_layout import layout_of, new_header
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.block_copier import BlockCopier, slots_of
from kvsidecar.kv_transfer.kv_layout import PagedKVCache

Write = Callable[[int, Tensor, Tensor, Tensor], None]
"""The engine's own write: keys and values ``[tokens, kv_heads, head_dim]`` of a layer to slots ``[tokens]``."""

# Marks are the base-128 digits of an element's number: integers below 128 are exact in every type.
_BASE = 128


def check_layout(cache: PagedKVCache, write: Write) -> None:
    """Check a declared layout against the engine's own writes.

    The engine writes values that encode their position, and the test reads them through the layout; then the test
    writes other values through the layout and reads them back. Uses two blocks and leaves them zero.

    Raises ConfigurationError when a value is not at its position in the layout.
    """
    if cache.blocks < 2:
        raise ConfigurationError(f"the cache has {cache.blocks} blocks; a check of its layout needs 2")
    # Two blocks in descending order, and not adjacent if there are enough blocks: an engine may allocate such blocks.
    slots = slots_of([cache.blocks - 1, 1 if cache.blocks > 2 else 0], cache.block_tokens)
    where = torch.from_numpy(slots).to(cache.device)
    shape = (2, len(slots), cache.geometry.kv_heads, cache.geometry.head_dim)
    number = np.arange(np.prod(shape)).reshape(shape)
    copier, marks = BlockCopier(cache), _MarkedPayload(cache, len(slots))
    while number.any():
        for layer in range(cache.geometry.layers):
            keys, values = (torch.from_numpy(m).to(cache.device, cache.dtype) for m in _marked(number, layer))
            write(layer, keys, values, where)
        _synchronize(cache)
        copier.pack(slots, marks.header, marks.payload)
        marks.compare(number, f"is not where {cache.name} is known to keep it")
        number //= _BASE
    number = np.arange(np.prod(shape))[::-1].reshape(shape)
    for payload in (marks.write(number), memoryview(bytes(len(marks.payload)))):
        copier.unpack(slots, marks.header, payload)
        copier.pack(slots, marks.header, marks.payload)
        if payload != marks.payload:
            raise ConfigurationError(f"what is written to {cache.name} is not what is read from it")


def _marked(number: NDArray[Any], layer: int) -> NDArray[Any]:
    """Return one digit of every element's number; layers differ, so that swapped layers are found."""
    return ((number + layer) % _BASE).astype(np.float32)


class _MarkedPayload:
    """A 16-bit payload of marks."""

    def __init__(self, cache: PagedKVCache, tokens: int) -> None:
        self._cache = cache
        # 16 bits, because quantized values would differ from the written values.
        self.header = new_header(replace(cache.geometry, bits=16), [0] * tokens, 0)
        self.payload = memoryview(bytearray(self.header.payload_bytes))

    def write(self, number: NDArray[Any]) -> memoryview:
        out = memoryview(bytearray(len(self.payload)))
        arrays = layout_of(self.header).arrays(out)
        for layer in range(self._cache.geometry.layers):
            for array, marks in zip((arrays["keys"], arrays["values"]), _marked(number, layer), strict=True):
                array[layer] = self._bits(marks)
        return out

    def compare(self, number: NDArray[Any], complaint: str) -> None:
        arrays = layout_of(self.header).arrays(self.payload)
        for layer in range(self._cache.geometry.layers):
            for name, marks in zip(("keys", "values"), _marked(number, layer), strict=True):
                wrong = np.argwhere(arrays[name][layer] != self._bits(marks))
                if len(wrong):
                    token, head, channel = wrong[0]
                    raise ConfigurationError(
                        f"layer {layer}'s {name} of token {token}, head {head}, channel {channel} {complaint}; "
                        f"{len(wrong)} of {marks.size} values are elsewhere, and its chunks would be wrong"
                    )

    def _bits(self, marks: NDArray[Any]) -> NDArray[Any]:
        """Return marked values in the form in which a payload stores them."""
        tensor = torch.from_numpy(marks).to(self._cache.dtype)
        return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()


def _synchronize(cache: PagedKVCache) -> None:
    if is_device(cache.device):
        device_of(cache.device).synchronize()
