"""FlashAttention-2 (Dao, 2023) on the CPU over a paged pool: a row's bits do not depend on what is computed with it.

Each row goes through the keys in blocks of 64 counted from the sequence's beginning, with running maximum and sum; all
arithmetic is per row and in one order, so prefill, its pieces, decode and scattered rows agree bit for bit, however
rows are put together and threads share them.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.cpu_attention_code import KEYS, PAGE, PARTS, TILE, Job, Kernel, Shape
from kvkernels.llvm_code import AVAILABLE, LANES, Function, cpu_has, run

__all__ = ["AVAILABLE", "PAGE", "Attention", "Rows", "about", "pages_for", "serves"]

# With more items of work than this for each thread, none waits long for the others.
_ITEMS = 4
_LEAST_TILE = 32
_MOST_DIM = 256
_ALIGN = 64
_NO_WINDOW = 1 << 40
_LOG2E = math.log2(math.e)


@cache
def _compiled(brain: bool, dim: int, per_kv: int, capped: bool) -> tuple[Shape, Function]:
    wide = cpu_has("avx512f")
    shape = Shape(brain, dim, per_kv, capped, cpu_has("avx512bf16"), PARTS if wide else 1)
    return shape, Function(Kernel(shape).text(), "attend")


def serves(dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel can run here, for elements and heads like these."""
    return AVAILABLE and dtype in (torch.bfloat16, torch.float32) and dim % LANES == 0 and dim <= _MOST_DIM


def about() -> str:
    """A line on what serves here."""
    if not AVAILABLE:
        return "torch SDPA (numba is not installed)"
    unit = next((name for name in ("avx512bf16", "avx512f") if cpu_has(name)), "any CPU's instructions")
    return f"ours, LLVM ({unit}); f32, bf16, head dims up to {_MOST_DIM} by {LANES}; others torch SDPA"


def pages_for(keys: int) -> int:
    """How many pages are read for so many keys: to the end of the last block."""
    return -(-keys // KEYS) * (KEYS // PAGE)


class Attention:
    """Where the rows of one batch and their keys are; the same for all layers of a model.

    Use it on the thread that made it: what its threads keep is that thread's.
    """

    def __init__(
        self,
        positions: NDArray[np.int64],
        sequences: Sequence[Rows],
        heads: int,
        pool: tuple[Tensor, Tensor],
        cap: float | None = None,
        observed: bool = False,
    ) -> None:
        """``positions [rows]``, contiguous. ``pool`` is keys and values, contiguous ``[layers, kv_heads, slots, dim]``.
        With ``cap``, scores become ``cap * tanh(score / cap)``. ``observed`` keeps what ``strongest`` gives. Raises
        ValueError where ``serves`` does not hold."""
        keys, values = pool
        _, kv_heads, _, dim = keys.shape
        if not serves(keys.dtype, dim):
            raise ValueError(f"no attention over {keys.dtype} heads of {dim} on this CPU")
        shape, self._function = _compiled(keys.dtype == torch.bfloat16, dim, heads // kv_heads, cap is not None)
        self._threads = torch.get_num_threads()
        self._keys, self._values = keys.data_ptr(), values.data_ptr()
        self._layer_bytes = keys.stride(0) * keys.element_size()
        pages = np.concatenate([s.pages for s in sequences])
        tiles = _tiles(sequences, kv_heads, shape.per_kv, self._threads)
        scratch, size = _scratch(shape, self._threads)
        keys_read = max(len(s.pages) for s in sequences) * PAGE
        self._looks = np.empty((len(tiles), heads, keys_read), np.float32) if observed else None
        self._held = keys, values, positions, pages, tiles, scratch
        self._items, self._cap = len(tiles) * kv_heads, cap
        self._job = Job(
            positions=positions.ctypes.data,
            pages=pages.ctypes.data,
            tiles=tiles.ctypes.data,
            scratch=-(-scratch.ctypes.data // _ALIGN) * _ALIGN,
            scratch_size=size,
            kv_heads=kv_heads,
            head_size=keys.stride(1),
            cap=_bits((cap or 0.0) * _LOG2E),
            looks=None if self._looks is None else self._looks.ctypes.data,
            look_size=keys_read,
        )

    def bind(self, query: Tensor, out: Tensor) -> None:
        """Sets where queries are read and results written, contiguous ``[rows, heads, dim]`` both."""
        self._job.query, self._job.out = query.data_ptr(), out.data_ptr()
        self._bound = query, out

    def __call__(self, layer: int, scale: float, window: int | None) -> None:
        """A layer's attention over keys at positions up to the row's, the last ``window`` of them. ``scale`` multiplies
        the scores. Releases the GIL."""
        job = self._job
        job.left, job.joined = self._items, 0
        job.keys, job.values = self._keys + layer * self._layer_bytes, self._values + layer * self._layer_bytes
        job.scale = _bits(scale * _LOG2E * (2 / self._cap if self._cap else 1))
        job.window = window or _NO_WINDOW
        if self._looks is not None:
            self._looks.fill(0)
        run(self._function, job, self._threads)

    def strongest(self) -> NDArray[np.float32]:
        """The strongest probability that any row gave each key in the layer before, ``[heads, keys]``, keys to the end
        of a block; of an ``observed`` batch of one sequence."""
        assert self._looks is not None, "the batch is not observed"
        found: NDArray[np.float32] = self._looks.max(0)
        return found


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence that follow each other in a batch, at rising positions.

    ``pages`` are the first slots of the sequence's pages of PAGE tokens: ``pages_for(keys)`` of them, all in the pool.
    """

    first: int
    count: int
    pages: NDArray[np.int64]


def _tiles(sequences: Sequence[Rows], kv_heads: int, per_kv: int, threads: int) -> NDArray[np.int64]:
    """Pieces of the sequences that are worked on together: ``[tiles, 3]`` of first row, rows, first page."""
    total = sum(s.count for s in sequences) * kv_heads
    most = max(1, TILE // per_kv)
    size = min(max(-(-total // (_ITEMS * threads)), -(-_LEAST_TILE // per_kv)), most)
    tiles, page = [], 0
    for s in sequences:
        tiles += [(s.first + at, min(size, s.count - at), page) for at in range(0, s.count, size)]
        page += len(s.pages)
    return np.array(tiles, np.int64)


def _bits(number: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value


class _Local(threading.local):
    def __init__(self) -> None:
        self.scratch: dict[tuple[int, int], NDArray[np.uint8]] = {}


_LOCAL = _Local()


def _scratch(shape: Shape, threads: int) -> tuple[NDArray[np.uint8], int]:
    """What a thread's team works in, and each of its threads' bytes of it."""
    size = sum(shape.kept().values())
    found = _LOCAL.scratch.get((size, threads))
    if found is None:
        found = _LOCAL.scratch[size, threads] = np.empty(size * threads + _ALIGN, np.uint8)
    return found, size
