"""FlashAttention-2 (Dao, 2023) on the CPU over a paged pool: a row's bits do not depend on what is computed with it.

Each row goes through the keys in pieces of 512 counted from the sequence's beginning; all arithmetic is per row and in
one order, so prefill, its parts, decode and scattered rows agree bit for bit, however rows are put together, sequences
are split and threads share them. ``kernels/cpu/attention.cpp`` says how.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.cpu.cpu_library import Call, Kernel, Library, found

__all__ = ["PAGE", "Attention", "Rows", "Standing", "about", "pages_for", "serves"]

# Tokens of a page, keys of a block, keys whose sums are kept apart.
PAGE, KEYS, PIECE = 32, 64, 512
# Rows times heads of a tile at most.
_TILE, _LEAST_TILE = 256, 32
# With more items of work than this for each thread, none waits long for the others.
_ITEMS = 4
_DIM_STEP, _MAX_DIM = 16, 256
_ALIGN = 64
_NO_WINDOW = 1 << 40
_LOG2E = math.log2(math.e)


class _Batch(ctypes.Structure):
    """``AttentionBatch`` in jobs.h."""

    _fields_ = (
        ("units", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "out", "positions", "pages", "unit", "scratch", "partial", "ended", "looks")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("look_size", "kv_heads", "per_kv", "dim", "head_size", "of_bf16", "capped")
        ),
        ("cap", ctypes.c_float),
    )


class _Job(ctypes.Structure):
    """``AttentionJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("taken", "joined")),
        *((name, ctypes.c_void_p) for name in ("batch", "keys", "values")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@cache
def _kernel(library: Library) -> Kernel:
    if library.number("attention_batch_bytes") != ctypes.sizeof(_Batch):
        raise RuntimeError(f"{library.name}'s batch of attention is not the one of this version: build it anew")
    return library.kernel("attention", _Job)


def serves(dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernel can run here, for elements and heads like these."""
    suits = dtype in (torch.bfloat16, torch.float32) and dim % _DIM_STEP == 0 and dim <= _MAX_DIM
    return suits and found().library is not None


def about() -> str:
    """A line on what serves here."""
    if found().library is None:
        return f"torch SDPA ({found().why})"
    return f"ours, {found().why}; f32, bf16, head dims up to {_MAX_DIM} by {_DIM_STEP}; others torch SDPA"


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
        ValueError where ``serves`` does not hold, or for more than 256 query heads to a key head."""
        keys, values = pool
        _, kv_heads, _, dim = keys.shape
        per_kv, library = heads // kv_heads, found().library
        if library is None or not serves(keys.dtype, dim) or per_kv > _TILE:
            raise ValueError(f"no attention over {keys.dtype} heads of {dim} on this CPU, {per_kv} to a key head")
        self._layers, self._threads = Layers(keys, values, cap), torch.get_num_threads()
        pages = np.concatenate([s.pages for s in sequences])
        work = _Work.of(positions, sequences, kv_heads, per_kv, self._threads, observed)
        scratch = _scratch(library.number("attention_scratch", dim) * self._threads)
        partial = np.empty(work.partial_rows * heads * library.number("attention_state", dim), np.float32)
        ended = np.zeros((work.split_tiles, kv_heads), np.int64)
        keys_read = max(len(s.pages) for s in sequences) * PAGE
        self._looks = np.empty((work.tiles, heads, keys_read), np.float32) if observed else None
        self._held: tuple[Any, ...] = positions, pages, work, scratch, partial, ended
        self._batch = _Batch(
            units=len(work.units),
            positions=positions.ctypes.data,
            pages=pages.ctypes.data,
            unit=work.units.ctypes.data,
            scratch=-(-scratch.ctypes.data // _ALIGN) * _ALIGN,
            partial=partial.ctypes.data,
            ended=ended.ctypes.data,
            looks=None if self._looks is None else self._looks.ctypes.data,
            look_size=keys_read,
            kv_heads=kv_heads,
            per_kv=per_kv,
            dim=dim,
            head_size=keys.stride(1),
            of_bf16=keys.dtype == torch.bfloat16,
            capped=cap is not None,
            cap=(cap or 0.0) * _LOG2E,
        )

    def bind(self, query: Tensor, out: Tensor) -> None:
        """Sets where queries are read and results written, contiguous ``[rows, heads, dim]`` both."""
        self._batch.query, self._batch.out = query.data_ptr(), out.data_ptr()
        self._bound = query, out

    def __call__(self, layer: int, scale: float, window: int | None) -> None:
        """A layer's attention over keys at positions up to the row's, the last ``window`` of them. ``scale`` multiplies
        the scores. Releases the GIL."""
        if self._looks is not None:
            self._looks.fill(0)
        self._layers.call(self._batch, layer, scale, window).together(self._threads)

    def strongest(self) -> NDArray[np.float32]:
        """The strongest probability that any row gave each key in the layer before, ``[heads, keys]``, keys to the end
        of a block; of an ``observed`` batch of one sequence."""
        assert self._looks is not None, "the batch is not observed"
        strongest: NDArray[np.float32] = self._looks.max(0)
        return strongest


class Standing:
    """The attention of one batch after another at the same place, for a chain: whatever it was last ``given``."""

    def __init__(self, pool: tuple[Tensor, Tensor], query: Tensor, out: Tensor) -> None:
        """``query`` and ``out`` are contiguous ``[rows, heads, dim]``, of as many rows as a batch can have."""
        self._layers, self._bound, self._batch = Layers(*pool), (query, out), _Batch()
        self._given: Attention | None = None

    def give(self, attention: Attention) -> None:
        """The batch of the next run."""
        attention.bind(*self._bound)
        ctypes.pointer(self._batch)[0] = attention._batch
        self._given = attention

    def call(self, layer: int, scale: float, window: int | None) -> Call:
        """A layer's; see ``Attention``."""
        return self._layers.call(self._batch, layer, scale, window)


class Layers:
    """Where the layers of a pool have their keys and values, ``[layers, kv_heads, slots, dim]`` both."""

    def __init__(self, keys: Tensor, values: Tensor, cap: float | None = None) -> None:
        library = found().library
        if library is None:
            raise ValueError(found().why)
        self._kernel, self._held, self._cap = _kernel(library), (keys, values), cap
        self._keys, self._values = keys.data_ptr(), values.data_ptr()
        self._layer_bytes = keys.stride(0) * keys.element_size()

    def call(self, batch: _Batch, layer: int, scale: float, window: int | None) -> Call:
        at = layer * self._layer_bytes
        job = _Job(
            batch=ctypes.addressof(batch),
            keys=self._keys + at,
            values=self._values + at,
            window=window or _NO_WINDOW,
            scale=scale * _LOG2E * (2 / self._cap if self._cap else 1),
        )
        return Call(self._kernel, job, (batch, self._held), counters=2)


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence that follow each other in a batch, at rising positions.

    ``pages`` are the first slots of the sequence's pages of PAGE tokens: ``pages_for(keys)`` of them, all in the pool.
    """

    first: int
    count: int
    pages: NDArray[np.int64]


@dataclass(frozen=True)
class _Work:
    """What threads take in turn: ``units [units, 7]``, the fields of ``Unit`` in attention.cpp."""

    units: NDArray[np.int64]
    tiles: int
    split_tiles: int
    partial_rows: int  # rows times pieces of the split tiles

    @classmethod
    def of(
        cls,
        positions: NDArray[np.int64],
        sequences: Sequence[Rows],
        kv_heads: int,
        per_kv: int,
        threads: int,
        whole: bool,
    ) -> _Work:
        """Cuts sequences into tiles and, where those are too few for the threads and not ``whole``, tiles into their
        pieces. How they are cut changes no bit."""
        wanted = _ITEMS * threads
        total = sum(s.count for s in sequences) * kv_heads
        size = min(max(-(-total // wanted), -(-_LEAST_TILE // per_kv)), max(1, _TILE // per_kv))
        tiles, page = [], 0
        for s in sequences:
            tiles += [(s.first + at, min(size, s.count - at), page) for at in range(0, s.count, size)]
            page += len(s.pages)
        few = threads > 1 and not whole and len(tiles) * kv_heads < wanted
        units, split, partial_rows = [], 0, 0
        for number, (first, count, first_page) in enumerate(tiles):
            pieces = int(positions[first + count - 1]) // PIECE + 1
            if not few or pieces == 1:
                units.append((first, count, first_page, number, -1, pieces, 0))
                continue
            units += [(first, count, first_page, split, piece, pieces, partial_rows) for piece in range(pieces)]
            split, partial_rows = split + 1, partial_rows + count * pieces
        return cls(np.array(units, np.int64), len(tiles), split, partial_rows)


class _Local(threading.local):
    def __init__(self) -> None:
        self.scratch: NDArray[np.float32] = np.empty(0, np.float32)


_LOCAL = _Local()


def _scratch(floats: int) -> NDArray[np.float32]:
    """What a thread's team works in."""
    if len(_LOCAL.scratch) < floats + _ALIGN:
        _LOCAL.scratch = np.empty(floats + _ALIGN, np.float32)
    return _LOCAL.scratch
