"""Moves tokens between a paged cache of any layout and arrays ``[layers, tokens, heads, channels]``.

Where an element lies is the sum of its block's, its token's, its head's and its channel's offset, which come as tables,
so that tiled and transposed caches cost a table and not a kernel of their own. On the CPU one pass compiled by numba,
without the GIL; elsewhere, and without numba, torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.compiled import AVAILABLE, compiled, over_parts

if AVAILABLE:
    from numba import carray, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def _pointer(_typing: Any, address: Any) -> Any:
        """An integer as a pointer."""

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return types.voidptr(address), generate


Integers = NDArray[np.int64]
_INTEGERS = {2: torch.int16, 4: torch.int32}
_NUMPY_INTEGERS = {2: np.int16, 4: np.int32}


@dataclass(frozen=True)
class PagedMemory:
    """The keys, or the values, of all layers, on one device.

    ``memory`` has one flat tensor per layer, whose element 0 is that of block 0, token 0, head 0 and channel 0;
    ``token``, ``head`` and ``channel`` are a block's offsets in elements. The memory is its owner's.
    """

    memory: tuple[Tensor, ...]
    block_tokens: int
    block_stride: int
    token: Integers
    head: Integers
    channel: Integers

    @property
    def addresses(self) -> Integers:
        return np.array([m.data_ptr() for m in self.memory], np.int64)

    @property
    def extent(self) -> int:
        """Elements that every layer's memory has."""
        return min(len(m) for m in self.memory)

    @property
    def plain(self) -> bool:
        """Whether a head's channels lie side by side."""
        return bool((np.diff(self.channel) == 1).all())


@compiled
def _out(
    first: int, end: int, addresses: Any, extent: int, plain: bool, block_tokens: int, block_stride: int, token: Any,
    head: Any, channel: Any, slots: Any, out: Any,
) -> None:  # fmt: skip
    channels = channel.shape[0]
    for layer in range(first, end):
        memory = carray(_pointer(addresses[layer]), extent, out.dtype)
        for h in range(head.shape[0]):
            for t in range(slots.shape[0]):
                slot = slots[t]
                if slot < 0:
                    continue
                at = slot // block_tokens * block_stride + token[slot % block_tokens] + head[h]
                row = out[layer, t, h]
                if plain:
                    for c in range(channels):
                        row[c] = memory[at + c]
                else:
                    for c in range(channels):
                        row[c] = memory[at + channel[c]]


@compiled
def _in(
    first: int, end: int, addresses: Any, extent: int, plain: bool, block_tokens: int, block_stride: int, token: Any,
    head: Any, channel: Any, slots: Any, source: Any,
) -> None:  # fmt: skip
    channels = channel.shape[0]
    for layer in range(first, end):
        memory = carray(_pointer(addresses[layer]), extent, source.dtype)
        for h in range(head.shape[0]):
            for t in range(slots.shape[0]):
                slot = slots[t]
                if slot < 0:
                    continue
                at = slot // block_tokens * block_stride + token[slot % block_tokens] + head[h]
                row = source[layer, t, h]
                if plain:
                    for c in range(channels):
                        memory[at + c] = row[c]
                else:
                    for c in range(channels):
                        memory[at + channel[c]] = row[c]


def gather(paged: PagedMemory, slots: Integers, out: Tensor | NDArray[Any]) -> None:
    """Copies tokens to ``out [layers, tokens, heads, channels]`` with any strides: a tensor of the cache's dtype on its
    device, or, for a cache in host memory, an array of elements of that size. ``slots [tokens]`` number the cache's
    tokens through its blocks; negative ones are left out. On CUDA enqueues on the current stream."""
    if _fused(paged):
        over_parts(_out, range(len(paged.memory)), *_arguments(paged), slots, _bits(out))
        return
    target = _tensor(out, paged)
    chosen, index = _index(paged, slots, target.device)
    for layer, memory in enumerate(paged.memory):
        target[layer].index_copy_(0, chosen, memory[index])


def scatter(paged: PagedMemory, slots: Integers, source: Tensor | NDArray[Any]) -> None:
    """The inverse of ``gather``: copies ``source [layers, tokens, heads, channels]`` to the cache's slots."""
    if _fused(paged):
        over_parts(_in, range(len(paged.memory)), *_arguments(paged), slots, _bits(source))
        return
    given = _tensor(source, paged)
    chosen, index = _index(paged, slots, given.device)
    for layer, memory in enumerate(paged.memory):
        memory[index] = given[layer].index_select(0, chosen)


def _fused(paged: PagedMemory) -> bool:
    return AVAILABLE and paged.memory[0].device.type == "cpu"


def _bits(data: Tensor | NDArray[Any]) -> NDArray[Any]:
    """The same memory as integers: numba moves them whatever they stand for."""
    array = data.view(_INTEGERS[data.itemsize]).numpy() if isinstance(data, Tensor) else data
    return array.view(_NUMPY_INTEGERS[array.itemsize])


def _tensor(data: Tensor | NDArray[Any], paged: PagedMemory) -> Tensor:
    if isinstance(data, Tensor):
        return data
    # A copy of what is only for reading: torch knows no such memory.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(paged.memory[0].dtype)


def _arguments(paged: PagedMemory) -> tuple[Any, ...]:
    return (
        paged.addresses, paged.extent, paged.plain, paged.block_tokens, paged.block_stride,
        paged.token, paged.head, paged.channel,
    )  # fmt: skip


def _index(paged: PagedMemory, slots: Integers, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens are wanted, and where their elements lie: ``[wanted]`` and ``[wanted, heads, channels]``."""
    chosen = np.flatnonzero(slots >= 0)
    wanted = slots[chosen]
    tokens = wanted // paged.block_tokens * paged.block_stride + paged.token[wanted % paged.block_tokens]
    parts = [torch.from_numpy(part).to(device) for part in (chosen, tokens, paged.head, paged.channel)]
    return parts[0], parts[1][:, None, None] + parts[2][:, None] + parts[3]
