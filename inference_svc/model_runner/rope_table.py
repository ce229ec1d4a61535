"""RoPE table: cosines and sines by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# 4,096 positions of 128 channels take about 10 ms on the engine's thread.
_PART = 4096
_MAX_INITIAL_POSITIONS = 1 << 17


class RopeTable:
    """Cosines and sines ``[positions, dim]``, which a model's rotary module computes a part at a time.

    The table has room for ``positions``, at first at most 131,072; the system provides the memory of a part when the
    part is computed. So neither the start of a worker nor the first long prompt pays for the whole context.
    """

    def __init__(self, rotary: Any, positions: int, dim: int) -> None:
        self._rotary, self._num_computed = rotary, 0
        capacity = min(positions, _MAX_INITIAL_POSITIONS)
        self._cos, self._sin = torch.empty(capacity, dim), torch.empty(capacity, dim)

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 cosines and sines ``[rows, dim]`` at ``positions [rows]``.

        The rotary module computes in the data type of ``like [rows, hidden]``.
        """
        self._compute_up_to(positions, like)
        return self._cos[positions], self._sin[positions]

    def write(self, positions: Tensor, like: Tensor, out: tuple[Tensor, Tensor]) -> None:
        """As ``at``, into the first rows of ``out``, two tensors ``[>= rows, dim]``."""
        self._compute_up_to(positions, like)
        for table, angles in zip((self._cos, self._sin), out, strict=True):
            torch.index_select(table, 0, positions, out=angles[: len(positions)])

    def _compute_up_to(self, positions: Tensor, like: Tensor) -> None:
        longest = int(positions.max()) + 1
        while self._num_computed < longest:
            self._compute_part(like)

    def _compute_part(self, like: Tensor) -> None:
        first, end = self._num_computed, self._num_computed + _PART
        if end > len(self._cos):
            padding = (0, 0, 0, max(end, 2 * len(self._cos)) - len(self._cos))
            self._cos, self._sin = functional.pad(self._cos, padding), functional.pad(self._sin, padding)
        cos, sin = self._rotary(like[None, :1], torch.arange(first, end)[None])
        self._cos[first:end], self._sin[first:end] = cos[0], sin[0]
        self._num_computed = end
