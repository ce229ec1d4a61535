"""KV pool: keys and values of all sequences, in blocks.

A block has ``PAGE_TOKENS`` token slots; identifiers call it a page. A sequence gets one contiguous range of blocks if
one is free, because torch's attention reads a contiguous range in place and must gather scattered blocks. Our kernels
read scattered blocks directly. The block after the last one is for padding rows.

The pool may have an overflow for sequences larger than the pool: on disk for a CPU, in host memory for a device. All
blocks of such a sequence are in the overflow; other sequences have no blocks there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from kvkernels.cpu import cpu_attention
from numpy.typing import NDArray

from inference_svc.kv_pool.block_allocator import BlockAllocator, zero_runs
from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS, UNMAPPED, BlockTable, KeyRanges
from inference_svc.kv_pool.overflow import Overflow
from inference_svc.kv_pool.zeroed_tensors import populate, zeros

# Blocks behind a sliding window are freed in units of this many tokens. Our kernels read keys in units of 64 and must
# not read a freed key.
WINDOW_STEP = 64
# Tokens per copy of a long prefix, in the pool or between the pool and its overflow.
_COPIED_TOKENS = 1024


class DeviceAttention(Protocol):
    """Our attention kernels on a pool's device. A batch is a ``ForwardBatch``, which this package may not import."""

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of batches for which these kernels are faster than torch's attention."""
        ...

    def serves(self, batch: Any) -> bool: ...

    def __call__(
        self, query: torch.Tensor, batch: Any, layer: int, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor: ...


class KVPool(BlockAllocator):
    """Keys and values ``[layers, kv_heads, slots, head_dim]`` of an engine's sequences.

    The keys of a head are contiguous, in the order in which attention reads them. Not thread-safe, except for the
    tensors' contents: the owner of a block table may read and write its slots from any thread.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (),
        overflow: Overflow | None = None,
    ) -> None:
        """Allocates the keys and values, or uses the tensors of an ``overflow``.

        ``windows``: for each layer, the number of last keys that a row sees, including its own; None for all keys. An
        ``overflow`` must have ``tokens`` tokens in memory.
        """
        super().__init__(max(1, tokens // PAGE_TOKENS), overflow)
        self.windows = tuple(windows)
        # Largest window of any layer, in keys; 0 if no layer has a window.
        self.max_window = max((w for w in self.windows if w), default=0)
        # Layers without a window, in models where other layers have one.
        self.wide_layers = tuple(i for i, w in enumerate(self.windows) if not w) if self.max_window else ()
        # Our attention kernels for the pool's device, used for the batches that they serve.
        self.native: DeviceAttention | None = None
        self.padding_slot = self.pages * PAGE_TOKENS
        end = self.padding_slot + KEY_BLOCK
        # Slot for loaded tokens that no sequence needs. They may be NaN: padded keys end before this slot.
        self.discard_slot = end - 1
        shape = (layers, kv_heads, end, head_dim)
        if overflow is not None:
            self.keys, self.values = overflow.keys, overflow.values
        elif device.type != "cpu":
            self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        else:
            self.keys, self.values = zeros(shape, dtype), zeros(shape, dtype)
        if device.type == "cpu":
            # A thread makes the memory pages resident before requests need them, so that the start does not wait.
            populate([head for tensor in (self.keys, self.values) for layer in tensor for head in layer[:, :end]])

    @cached_property
    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, ``[kv_heads, slots, head_dim]``."""
        return list(zip(self.keys, self.values, strict=True))

    @cached_property
    def attends_by_pages(self) -> bool:
        """True if our CPU kernel serves this pool: scattered blocks then cost no more than contiguous ones."""
        return self.keys.device.type == "cpu" and cpu_attention.serves(self.keys.dtype, self.keys.shape[3])

    @property
    def merges_ranges(self) -> bool:
        """True if our device kernels read a sequence in two ranges as fast as in one, and a shared range only once."""
        device, native = self.keys.device.type, self.native
        return device != "cpu" and native is not None and "decode" in native.kinds and not self.max_window

    def ranges_behind(self, table: BlockTable, position: int) -> KeyRanges | None:
        """The at most two ranges of a table's keys, if rows from ``position`` on see the whole first one; else None.

        With a window, rows may see only a part of it.
        """
        ranges = table.key_ranges
        return ranges if ranges is not None and ranges.tokens <= (0 if self.max_window else position) else None

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    @property
    def window(self) -> int:
        """Largest window of any layer, in keys; 0 if some layer sees all keys."""
        return 0 if self.wide_layers else self.max_window

    @property
    def reclaims_window(self) -> bool:
        """True if blocks behind the window can be freed: no layer sees all keys, and blocks may be scattered."""
        return bool(self.window) and self.attends_by_pages

    def first_visible(self, position: int) -> int:
        """First token that windowed layers see from ``position - 1``, rounded down to a multiple of WINDOW_STEP.

        The reference is ``position - 1`` because a request that shares a prompt computes the prompt's last token again.
        """
        return self.round_to_step(max(0, position - self.max_window)) if self.max_window else 0

    @staticmethod
    def round_to_step(tokens: int) -> int:
        """Rounds tokens down to a multiple of WINDOW_STEP, the unit of release."""
        return tokens // WINDOW_STEP * WINDOW_STEP

    def covers_window(self, table: BlockTable, tokens: int) -> bool:
        """True if a table has all keys that the row after the first ``tokens`` tokens sees."""
        return table.first_valid_token <= max(0, tokens + 1 - self.max_window)

    def copy(self, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Copies keys and values of tokens ``start`` to ``end`` between two tables."""
        if end <= start:
            return
        a, b = source.first_slot, target.first_slot
        assert start >= max(source.num_released, target.num_released), "pages are copied that are not held"
        if a is not None and b is not None:
            self.copy_slots(a + start, b + start, end - start)
        else:
            self.copy_scattered(source.slots(start, end), target.slots(start, end))

    def copy_in_pieces(self, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Copies like ``copy``, with little memory for each piece."""
        for at in range(start, end, _COPIED_TOKENS):
            self.copy(source, target, at, min(at + _COPIED_TOKENS, end))

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copies ``count`` contiguous slots."""
        for tensor in (self.keys, self.values):
            tensor[:, :, target : target + count] = tensor[:, :, source : source + count]

    def copy_scattered(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copies slots ``source [n]`` to slots ``target [n]``."""
        for tensor in (self.keys, self.values):
            here, there = (torch.from_numpy(slots).to(tensor.device) for slots in (source, target))
            tensor.index_copy_(2, there, tensor.index_select(2, here))

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Zeroes slots ``[n]``."""
        for tensor in (self.keys, self.values):
            tensor.index_fill_(2, torch.from_numpy(slots).to(tensor.device), 0)

    def zero_range(self, first: int, count: int) -> None:
        """Zeroes ``count`` contiguous slots."""
        for tensor in (self.keys, self.values):
            tensor[:, :, first : first + count] = 0

    def zero_tokens(self, table: BlockTable, start: int, end: int) -> None:
        """Zeroes keys and values of tokens ``start`` to ``end``; no other table may refer to their blocks."""
        self.zero_slots(table.slots(start, end))

    def zero_exclusive(self, table: BlockTable) -> None:
        """Zeroes the blocks to which only this table refers.

        Freed blocks must be finite: attention reads behind a sequence's end and multiplies these values by zero, and
        NaN times zero is NaN.
        """
        for page, pages in table.mapped_ranges:
            for first, length in zero_runs(self._references[page : page + pages] - 1):
                if not table.in_overflow:
                    self.zero_range((page + first) * PAGE_TOKENS, length * PAGE_TOKENS)
                elif self.overflow is not None:
                    self.overflow.clear(page + first, length)

    def find_not_finite(self, table: BlockTable, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions (ascending) whose keys or values contain NaN or infinity."""
        if not len(positions):
            return positions
        slots = table.slots(0, int(positions[-1]) + 1)[positions]
        held = slots != UNMAPPED
        corrupt: NDArray[np.int64] = positions[held][~self.are_finite(slots[held])]
        return corrupt

    def are_finite(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns for each slot whether its keys and values are finite in all layers."""
        at = torch.from_numpy(slots).to(self.keys.device)
        sound = torch.ones(len(slots), dtype=torch.bool, device=at.device)
        for tensor in (self.keys, self.values):
            for layer in tensor:  # copies one layer at a time, to save memory
                sound &= layer.index_select(1, at).isfinite().all(-1).all(0)
        found: NDArray[np.bool_] = sound.cpu().numpy()
        return found
