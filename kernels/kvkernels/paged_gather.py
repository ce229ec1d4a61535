"""Moves tokens between a paged cache of any layout and arrays ``[layers, tokens, heads, channels]``.

Where an element lies is the sum of its block's, its token's, its head's and its channel's offset, which come as tables,
so that tiled and transposed caches cost a table and not a kernel of their own. On the CPU one compiled pass without the
GIL (``cpu/paged_copy.py``); elsewhere, and without compiled kernels, torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.cpu.cpu_library import Library, found
from kvkernels.cpu.paged_copy import move

Integers = NDArray[np.int64]
_INTEGERS = {2: torch.int16, 4: torch.int32}


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


def gather(paged: PagedMemory, slots: Integers, out: Tensor | NDArray[Any]) -> None:
    """Copies tokens to ``out [layers, tokens, heads, channels]`` with any strides: a tensor of the cache's dtype on its
    device, or, for a cache in host memory, an array of elements of that size. ``slots [tokens]`` number the cache's
    tokens through its blocks; negative ones are left out. On CUDA enqueues on the current stream."""
    if library := _library(paged):
        _move(library, "gather", paged, slots, out)
        return
    target = _tensor(out, paged)
    chosen, index = _index(paged, slots, target.device)
    for layer, memory in enumerate(paged.memory):
        target[layer].index_copy_(0, chosen, memory[index])


def scatter(paged: PagedMemory, slots: Integers, source: Tensor | NDArray[Any]) -> None:
    """The inverse of ``gather``: copies ``source [layers, tokens, heads, channels]`` to the cache's slots."""
    if library := _library(paged):
        _move(library, "scatter", paged, slots, source)
        return
    given = _tensor(source, paged)
    chosen, index = _index(paged, slots, given.device)
    for layer, memory in enumerate(paged.memory):
        memory[index] = given[layer].index_select(0, chosen)


def _library(paged: PagedMemory) -> Library | None:
    return found().library if paged.memory[0].device.type == "cpu" else None


def _move(library: Library, name: str, paged: PagedMemory, slots: Integers, data: Tensor | NDArray[Any]) -> None:
    # As integers: bits are moved, whatever they stand for.
    array = data.view(_INTEGERS[data.itemsize]).numpy() if isinstance(data, Tensor) else data
    block, offsets = (paged.block_tokens, paged.block_stride), (paged.token, paged.head, paged.channel)
    move(library, name, paged.addresses, block, offsets, slots, array)


def _tensor(data: Tensor | NDArray[Any], paged: PagedMemory) -> Tensor:
    if isinstance(data, Tensor):
        return data
    # A copy of what is only for reading: torch knows no such memory.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(paged.memory[0].dtype)


def _index(paged: PagedMemory, slots: Integers, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tokens are wanted, and where their elements lie: ``[wanted]`` and ``[wanted, heads, channels]``."""
    chosen = np.flatnonzero(slots >= 0)
    wanted = slots[chosen]
    tokens = wanted // paged.block_tokens * paged.block_stride + paged.token[wanted % paged.block_tokens]
    parts = [torch.from_numpy(part).to(device) for part in (chosen, tokens, paged.head, paged.channel)]
    return parts[0], parts[1][:, None, None] + parts[2][:, None] + parts[3]
