"""Gather and scatter of tokens between a paged cache and dense arrays.

The cache may have any layout; arrays are ``[layers, tokens, heads, channels]``. The offset of an element in its layer
is the sum of the offsets of its block, token, head and channel. The offsets are tables, so that tiled and transposed
caches need no special kernel. On the CPU, one compiled pass without the GIL copies the tokens (``cpu/paged_copy.py``);
on other devices, and without compiled kernels, torch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.cpu.cpu_library import KernelLibrary, loaded_library
from kvkernels.cpu.paged_copy import copy_tokens

Integers = NDArray[np.int64]
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class PagedMemory:
    """Keys or values of all layers of a paged cache, on one device.

    ``memory`` has one flat tensor per layer, whose element 0 is that of block 0, token 0, head 0 and channel 0;
    ``token``, ``head`` and ``channel`` are a block's offsets in elements. The engine owns the memory.
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
    """Copy tokens to ``out [layers, tokens, heads, channels]``, which may have any strides.

    ``out`` is a tensor of the cache's dtype on its device, or, for a cache in host memory, an array of elements of that
    size. ``slots [tokens]`` number the cache's tokens across its blocks; negative slots are skipped. On CUDA enqueues
    on the current stream.
    """
    if library := _library(paged):
        _copy(library, "paged_gather", paged, slots, out)
        return
    target = _tensor(out, paged)
    chosen, index = _index(paged, slots, target.device)
    for layer, memory in enumerate(paged.memory):
        target[layer].index_copy_(0, chosen, memory[index])


def scatter(paged: PagedMemory, slots: Integers, source: Tensor | NDArray[Any]) -> None:
    """Copy ``source [layers, tokens, heads, channels]`` to the cache's slots: the inverse of ``gather``."""
    if library := _library(paged):
        _copy(library, "paged_scatter", paged, slots, source)
        return
    given = _tensor(source, paged)
    chosen, index = _index(paged, slots, given.device)
    for layer, memory in enumerate(paged.memory):
        memory[index] = given[layer].index_select(0, chosen)


def _library(paged: PagedMemory) -> KernelLibrary | None:
    return loaded_library().library if paged.memory[0].device.type == "cpu" else None


def _copy(library: KernelLibrary, name: str, paged: PagedMemory, slots: Integers, data: Tensor | NDArray[Any]) -> None:
    # As integers: the copy preserves bits of any dtype.
    array = data.view(_INTEGERS[data.itemsize]).numpy() if isinstance(data, Tensor) else data
    block, offsets = (paged.block_tokens, paged.block_stride), (paged.token, paged.head, paged.channel)
    copy_tokens(library, name, paged.addresses, block, offsets, slots, array)


def _tensor(data: Tensor | NDArray[Any], paged: PagedMemory) -> Tensor:
    if isinstance(data, Tensor):
        return data
    # torch has no read-only tensors: copy read-only memory.
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(paged.memory[0].dtype)


def _index(paged: PagedMemory, slots: Integers, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of non-negative slots ``[wanted]`` and element offsets ``[wanted, heads, channels]``."""
    chosen = np.flatnonzero(slots >= 0)
    wanted = slots[chosen]
    tokens = wanted // paged.block_tokens * paged.block_stride + paged.token[wanted % paged.block_tokens]
    parts = [torch.from_numpy(part).to(device) for part in (chosen, tokens, paged.head, paged.channel)]
    return parts[0], parts[1][:, None, None] + parts[2][:, None] + parts[3]
