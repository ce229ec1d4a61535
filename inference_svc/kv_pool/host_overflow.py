"""Host overflow: host memory that extends the tensors of a device's pool for long sequences.

The keys (or values) of each head are contiguous in the pool, ordered by slot. So each head of each layer has one strip
of the device's address range: first the slots in device memory, then the slots in host memory, which the device reads
and writes in place over its link (``Device.extended``). Kernels treat both kinds of slots in the same way, and no
answer depends on the location of its blocks.

A step reads all keys of a sequence once over the link, so it takes at least their bytes divided by the link's
bandwidth. Attention of many rows would read them several times, and copies them to device memory first
(``cuda_attention``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import OverflowFailed
from kvsidecar.process.free_memory import free_bytes
from torch import Tensor

from inference_svc.kv_pool.block_allocator import zero_runs
from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS
from inference_svc.kv_pool.overflow import count_blocks

# Both parts of a strip are multiples of this size, because a device maps memory in pages.
_GRANULE_BYTES = 64 << 10


class HostOverflow:
    """Tensors whose first slots are in device memory and whose last slots are in host memory.

    Only the engine's thread calls the methods; other threads may read and write the tensors, as those of any pool.
    Host memory is taken when a block is first reserved, and stays with the worker.
    """

    frees_space: ClassVar[bool] = False
    keeps_preempted: ClassVar[bool] = True

    def __init__(
        self,
        extended: Callable[[int, int, int], Tensor],
        layers: int,
        kv_heads: int,
        head_dim: int,
        memory_tokens: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocates the device's part, and address space for ``tokens`` tokens on the host.

        ``extended`` is this method of the device. Raises DeviceLacks, torch.OutOfMemoryError.
        """
        self._page_bytes, self._strips = PAGE_TOKENS * head_dim * dtype.itemsize, layers * kv_heads
        counts = count_blocks(memory_tokens, tokens, self._page_bytes, _GRANULE_BYTES)
        self.memory_pages, self.first_page, self.pages = counts
        parts = self.first_page * self._page_bytes, self.pages * self._page_bytes
        shape = (layers, kv_heads, (self.first_page + self.pages) * PAGE_TOKENS, head_dim)
        self.keys, self.values = (extended(self._strips, *parts).view(dtype).view(shape) for _ in range(2))
        self._taken = np.zeros(self.pages, np.int32)  # 1: the block has host memory
        self._zero(0, self.first_page)

    @property
    def size_bytes(self) -> int:
        """Size of the host's part with all blocks in use."""
        return self.pages * self._bytes_per_page

    def reserve(self, page: int, pages: int) -> None:
        """Takes host memory for blocks before they are written, and zeroes it.

        Attention may read the KEY_BLOCK slots behind a sequence's end, whose values must be finite. So the blocks of
        these slots get memory, too. Raises OverflowFailed if the host has too little; then no block gets any.
        """
        first = page - self.first_page
        taken = self._taken[first : first + pages + KEY_BLOCK // PAGE_TOKENS]
        needed = int(np.count_nonzero(taken == 0)) * self._bytes_per_page
        if not needed:
            return
        self.keys[0, 0, 0, 0].item()  # waits for the device: memory that it has not written yet counts as free
        free = free_bytes()
        if needed > free:
            raise OverflowFailed(
                f"the prompt and its answer need more than this worker's pool, and the host has no room for "
                f"{format_size(needed)} of them: {format_size(free)} are free; shorten it, or free memory there"
            )
        for start, length in zero_runs(taken):
            self._zero(page + start, length)
        taken[:] = 1

    def release(self, page: int, pages: int) -> None:
        """Keeps the memory of unreferenced blocks for their next owner."""

    def clear(self, page: int, pages: int) -> None:
        """Zeroes those of the blocks that have host memory."""
        first = page - self.first_page
        for start, length in zero_runs(self._taken[first : first + pages] - 1):
            self._zero(page + start, length)

    @property
    def _bytes_per_page(self) -> int:
        return 2 * self._strips * self._page_bytes

    def _zero(self, page: int, pages: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, :, page * PAGE_TOKENS : (page + pages) * PAGE_TOKENS] = 0
