"""Batch-invariant FlashAttention-2 (Dao, 2023) on the CPU over a paged KV pool.

Each row processes its keys in pieces of 512, counted from the start of the sequence. All arithmetic is per row and in a
fixed order, so prefill, chunked prefill, decode and scattered rows agree bit for bit, regardless of how rows are
batched, how sequences are split and how threads share the work. Algorithm: ``kernels/cpu/attention.cpp``.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkernels.cpu.cpu_library import Kernel, KernelCall, KernelLibrary, loaded_library

# Tokens per page, keys per block, and keys per piece (pieces are summed alone and then merged).
PAGE, KEYS, PIECE = 32, 64, 512
# Limits of rows times heads per tile.
_TILE, _MIN_TILE = 256, 32
# Work items per thread that balance the load.
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
            for name in (
                "query",
                "out",
                "positions",
                "pages",
                "unit",
                "scratch",
                "partial",
                "finished_pieces",
                "max_probs",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "max_probs_stride",
                "max_probs_layer",
                "kv_heads",
                "group_size",
                "dim",
                "kv_head_stride",
                "of_bf16",
                "has_softcap",
            )
        ),
        ("softcap", ctypes.c_float),
    )


class _Job(ctypes.Structure):
    """``AttentionJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next_item", "joined_threads")),
        *((name, ctypes.c_void_p) for name in ("batch", "keys", "values")),
        ("window", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@cache
def _kernel(library: KernelLibrary) -> Kernel:
    if library.number("attention_batch_bytes") != ctypes.sizeof(_Batch):
        raise RuntimeError(f"{library.name}'s attention batch has another size: build it anew")
    return library.kernel("attention", _Job)


def serves(dtype: torch.dtype, dim: int) -> bool:
    """Return True if the kernel runs on this machine for this dtype and head dim."""
    suits = dtype in (torch.bfloat16, torch.float32) and dim % _DIM_STEP == 0 and dim <= _MAX_DIM
    return suits and loaded_library().library is not None


def describe() -> str:
    """Describe the implementation in use, in one line."""
    if loaded_library().library is None:
        return f"torch SDPA ({loaded_library().why})"
    return f"ours, {loaded_library().why}; f32, bf16, head dims up to {_MAX_DIM} by {_DIM_STEP}; others torch SDPA"


def num_pages(keys: int) -> int:
    """Return the number of pages read for ``keys`` keys, up to the end of the last block."""
    return -(-keys // KEYS) * (KEYS // PAGE)


class Attention:
    """Attention plan of one batch: rows, pages and work items, shared by all layers of a model.

    Use it on the thread that created it; the scratch memory is thread-local.
    """

    def __init__(
        self,
        positions: NDArray[np.int64],
        sequences: Sequence[SequenceRows],
        heads: int,
        pool: tuple[Tensor, Tensor],
        softcap: float | None = None,
        recorded_layers: int = 0,
    ) -> None:
        """Plan a batch; ``positions [rows]`` is contiguous.

        ``pool`` is keys and values, contiguous ``[layers, kv_heads, slots, dim]``. With ``softcap``, scores become
        ``softcap * tanh(score / softcap)``. ``recorded_layers`` is the number of layers whose ``max_probs()`` are
        kept: none, 1 (the last computed layer) or all of the pool. Raises ValueError if ``serves`` is False, or for
        more than 256 query heads per KV head.
        """
        keys, values = pool
        _, kv_heads, _, dim = keys.shape
        group_size, library = heads // kv_heads, loaded_library().library
        if library is None or not serves(keys.dtype, dim) or group_size > _TILE:
            raise ValueError(f"no attention over {keys.dtype} heads of {dim} on this CPU, {group_size} to a key head")
        self._layers, self._threads = PoolLayers(keys, values, softcap), torch.get_num_threads()
        pages = np.concatenate([s.pages for s in sequences])
        work = _Work.of(positions, sequences, kv_heads, group_size, self._threads, recorded_layers > 0)
        scratch = _scratch(library.number("attention_scratch", dim) * self._threads)
        partial = np.empty(work.partial_rows * heads * library.number("attention_state", dim), np.float32)
        finished_pieces = np.zeros((work.split_tiles, kv_heads), np.int64)
        keys_read = max(len(s.pages) for s in sequences) * PAGE
        self._max_probs = np.zeros((recorded_layers, work.tiles, heads, keys_read), np.float32)
        self._held: tuple[Any, ...] = positions, pages, work, scratch, partial, finished_pieces
        self._batch = _Batch(
            units=len(work.units),
            positions=positions.ctypes.data,
            pages=pages.ctypes.data,
            unit=work.units.ctypes.data,
            scratch=-(-scratch.ctypes.data // _ALIGN) * _ALIGN,
            partial=partial.ctypes.data,
            finished_pieces=finished_pieces.ctypes.data,
            max_probs=self._max_probs.ctypes.data if recorded_layers else None,
            max_probs_stride=keys_read,
            max_probs_layer=self._max_probs[0].size if recorded_layers > 1 else 0,
            kv_heads=kv_heads,
            group_size=group_size,
            dim=dim,
            kv_head_stride=keys.stride(1),
            of_bf16=keys.dtype == torch.bfloat16,
            has_softcap=softcap is not None,
            softcap=(softcap or 0.0) * _LOG2E,
        )

    def bind(self, query: Tensor, out: Tensor) -> None:
        """Set the query and output tensors, both contiguous ``[rows, heads, dim]``."""
        self._batch.query, self._batch.out = query.data_ptr(), out.data_ptr()
        self._bound = query, out

    def __call__(self, layer: int, scale: float, window: int | None) -> None:
        """Compute causal attention of one layer, over the last ``window`` keys of each row.

        ``scale`` multiplies the scores. Releases the GIL.
        """
        if len(self._max_probs) == 1:
            self._max_probs.fill(0)
        self._layers.call(self._batch, layer, scale, window).run(self._threads)

    def max_probs(self) -> Iterator[NDArray[np.float32]]:
        """Yield each key's maximum probability over rows, ``[heads, keys]``, for each of the recorded layers.

        Keys extend to the end of a block. Requires a batch of one sequence.
        """
        for layer in self._max_probs:
            yield layer.max(0)


class PreparedAttention:
    """Attention calls with fixed buffers for a KernelGraph.

    ``set_batch`` selects the batch that the calls compute.
    """

    def __init__(self, pool: tuple[Tensor, Tensor], query: Tensor, out: Tensor) -> None:
        """Create the calls; ``query`` and ``out`` are contiguous ``[rows, heads, dim]``.

        Both tensors have the size of the largest batch.
        """
        self._layers, self._bound, self._batch = PoolLayers(*pool), (query, out), _Batch()
        self._attention: Attention | None = None

    def set_batch(self, attention: Attention) -> None:
        """Set the batch of the next run."""
        if attention is not self._attention:
            attention.bind(*self._bound)
            ctypes.pointer(self._batch)[0] = attention._batch
            self._attention = attention

    def call(self, layer: int, scale: float, window: int | None) -> KernelCall:
        """Build the call of one layer; see ``Attention.__call__``."""
        return self._layers.call(self._batch, layer, scale, window)


class PoolLayers:
    """Addresses of the layers of a pool; keys and values are ``[layers, kv_heads, slots, dim]``."""

    def __init__(self, keys: Tensor, values: Tensor, softcap: float | None = None) -> None:
        library = loaded_library().library
        if library is None:
            raise ValueError(loaded_library().why)
        self._kernel, self._held, self._softcap = _kernel(library), (keys, values), softcap
        self._keys, self._values = keys.data_ptr(), values.data_ptr()
        self._layer_bytes = keys.stride(0) * keys.element_size()

    def call(self, batch: _Batch, layer: int, scale: float, window: int | None) -> KernelCall:
        """Build the call of one layer over ``batch``."""
        at = layer * self._layer_bytes
        job = _Job(
            batch=ctypes.addressof(batch),
            keys=self._keys + at,
            values=self._values + at,
            window=window or _NO_WINDOW,
            layer=layer,
            scale=scale * _LOG2E * (2 / self._softcap if self._softcap else 1),
        )
        return KernelCall(self._kernel, job, (batch, self._held), counters=2)


@dataclass(frozen=True)
class SequenceRows:
    """Consecutive rows of one sequence in a batch, at ascending positions.

    ``pages`` has the first slot of each of the sequence's ``num_pages(keys)`` pages (PAGE tokens each); all slots of
    these pages are in the pool.
    """

    first: int
    count: int
    pages: NDArray[np.int64]


@dataclass(frozen=True)
class _Work:
    """Work items that threads claim: ``units [units, 7]``, the fields of ``AttentionUnit`` in jobs.h."""

    units: NDArray[np.int64]
    tiles: int
    split_tiles: int
    partial_rows: int  # rows times pieces of the split tiles

    @classmethod
    def of(
        cls,
        positions: NDArray[np.int64],
        sequences: Sequence[SequenceRows],
        kv_heads: int,
        group_size: int,
        threads: int,
        whole: bool,
    ) -> _Work:
        """Split sequences into tiles, and tiles into pieces.

        Splits tiles only if there are too few for the threads, and not with ``whole``. The split does not change the
        result's bits.
        """
        wanted = _ITEMS * threads
        total = sum(s.count for s in sequences) * kv_heads
        size = min(max(-(-total // wanted), -(-_MIN_TILE // group_size)), max(1, _TILE // group_size))
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
    """Return the calling thread's scratch memory, of at least ``floats`` floats."""
    if len(_LOCAL.scratch) < floats + _ALIGN:
        _LOCAL.scratch = np.empty(floats + _ALIGN, np.float32)
    return _LOCAL.scratch
