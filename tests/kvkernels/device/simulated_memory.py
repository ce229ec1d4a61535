"""Simulated memory: blocks of a device and pinned blocks of the host, which are found by address."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kvkernels.device.device_fault import OutOfBounds, PageableMemory, UseAfterFree

POISON = 0xFF  # these bytes are NaN in every float format
_ALIGNMENT = 4096


@dataclass(eq=False)
class Block:
    """One allocation. ``pending`` has the byte ranges that enqueued work uses, and whether the work writes them."""

    address: int
    size_bytes: int
    pinned: bool
    ordinal: int
    site: str
    pages: mmap.mmap = field(repr=False)
    host_bytes: int = 0  # bytes of a device's block that are in host memory
    written: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int, bool]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def view(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return the device's own view of some bytes. The view does not keep the block allocated."""
        return np.frombuffer(self.pages, np.uint8)[start:end]

    def mark_written(self, start: int, end: int) -> None:
        merged = [(start, end)]
        for a, b in self.written:
            if b < merged[0][0] or a > merged[0][1]:
                merged.append((a, b))
            else:
                merged[0] = min(a, merged[0][0]), max(b, merged[0][1])
        self.written = merged

    def is_written(self, start: int, end: int) -> bool:
        return any(a <= start and end <= b for a, b in self.written)

    def busy(self, start: int, end: int, only_writes: bool = False) -> bool:
        """Return whether enqueued work uses some of the bytes."""
        return any(a < end and start < b and (writes or not only_writes) for a, b, writes in self.pending)


class BlockTable:
    """All blocks of a process's simulated devices, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._freed: list[tuple[int, int, str]] = []

    def allocate(
        self, size_bytes: int, pinned: bool, ordinal: int, site: str, freed: Callable[[Block], None], poison: bool
    ) -> tuple[Block, Tensor]:
        """Allocate a block. Calls ``freed`` when the last tensor on the block is gone."""
        pages = mmap.mmap(-1, -(-max(size_bytes, 1) // _ALIGNMENT) * _ALIGNMENT)
        memory = (ctypes.c_uint8 * max(size_bytes, 1)).from_buffer(pages)
        block = Block(ctypes.addressof(memory), size_bytes, pinned, ordinal, site, pages)
        self._freed = [old for old in self._freed if old[1] <= block.address or block.end <= old[0]][-1000:]
        bisect.insort(self._starts, block.address)
        self._blocks[block.address] = block
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size_bytes]
        if poison:
            tensor.fill_(POISON)
        weakref.finalize(memory, self._free, block, freed)
        return block, tensor

    def _free(self, block: Block, freed: Callable[[Block], None]) -> None:
        self._starts.remove(block.address)
        del self._blocks[block.address]
        self._freed.append((block.address, block.end, block.site))
        freed(block)

    def find(self, address: int, size_bytes: int = 1) -> Block:
        """Return the block that contains an address range. Raises OutOfBounds, UseAfterFree, PageableMemory."""
        at = bisect.bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[at]] if at >= 0 else None
        if block is not None and address < block.end:
            if address + size_bytes > block.end:
                raise OutOfBounds(
                    f"{size_bytes} bytes at {address:#x} end {address + size_bytes - block.end} bytes behind their "
                    f"memory, allocated at {block.site}"
                )
            return block
        for start, end, site in self._freed:
            if start <= address < end:
                raise UseAfterFree(f"address {address:#x} was allocated at {site}, and freed")
        raise PageableMemory(f"address {address:#x} is neither a device's nor pinned")
