"""Launch configuration of CUDA attention: variant, grid, splits, workspace."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name
from kvkernels.device.visible_devices import device_of, is_device

HEAD_DIMS = (64, 96, 128, 256)
THREADS, ROWS = 128, 64
# Up to this many rows per KV head, a block has all of them, and its warps share the keys. About three blocks fit an SM.
FEW_ROWS, _FEW_BLOCKS = 16, 3


class _AttentionParams(ctypes.Structure):
    """``AttentionParams`` in cuda/attention_params.h."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("query", "keys", "values", "output", "lse", "part_output", "part_lse")),
        *((n, ctypes.c_void_p) for n in ("qo_indptr", "kv_lens", "positions", "first_slot", "pages")),
        *((n, ctypes.c_int64) for n in ("query_row_stride", "kv_head_stride")),
        *((n, ctypes.c_int) for n in ("rows", "heads", "kv_heads", "max_pages", "page_shift")),
        *((n, ctypes.c_int) for n in ("splits", "first_part", "sliding_window")),
        *((n, ctypes.c_float) for n in ("sm_scale", "logits_soft_cap")),
    )


class _CombineParams(ctypes.Structure):
    """``CombineParams`` in cuda/attention_params.h."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("part_output", "part_lse", "output", "lse")),
        *((n, ctypes.c_int) for n in ("parts", "rows_heads", "dim", "reserved")),
    )


@dataclass(frozen=True)
class AttentionRows:
    """Query rows of a call by sequence, all int32 on the device.

    ``qo_indptr [sequences + 1]``, ``kv_lens [sequences]``, ``positions [rows]``; without positions, the rows are the
    last ones of each sequence. ``max_q_len`` and ``max_kv_len`` bound the grid.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    positions: Tensor | None
    max_q_len: int
    max_kv_len: int

    @property
    def sequences(self) -> int:
        return int(self.kv_lens.shape[0])


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer in the pool, ``[kv_heads, slots, dim]``.

    ``first_slot [sequences]`` if each sequence is contiguous, else ``pages [sequences, max_pages]`` of ``page_tokens``
    (a power of two); both int32.
    """

    keys: Tensor
    values: Tensor
    first_slot: Tensor | None = None
    pages: Tensor | None = None
    page_tokens: int = 1


def splits_for(tiles: int, max_kv_len: int, processors: int, blocks: int = 2) -> int:
    """Return the number of KV splits that gives each SM about this many blocks, of at least 256 keys each."""
    wanted = -(-blocks * processors // max(1, tiles))
    return max(1, min(wanted, max_kv_len // 256, 64))


def attend(
    kernels: Kernels,
    query: Tensor,
    source: PagedKV,
    rows: AttentionRows,
    sm_scale: float,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of ``query [rows, heads, dim]`` over ``source``: output and log-sum-exp ``[rows, heads]``.

    The log-sum-exp is float32, natural, and -inf for rows without a visible key. FlashAttention-2, arXiv:2307.08691.
    """
    parts = CascadeAttention(kernels, query, rows, sm_scale, sliding_window, logits_soft_cap)
    parts.add(source, splits)
    return parts.combined()


class CascadeAttention:
    """Attention over several key ranges, merged by log-sum-exp: add each source, then combine.

    Each source has its own sequences, so rows of several sequences can be one sequence where they share keys.
    """

    def __init__(
        self,
        kernels: Kernels,
        query: Tensor,
        rows: AttentionRows,
        sm_scale: float,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
    ) -> None:
        if query.shape[2] not in HEAD_DIMS:
            raise ValueError(f"head_dim is {query.shape[2]}; kernels take {', '.join(map(str, HEAD_DIMS))}")
        self._kernels, self._query, self._rows = kernels, query, rows
        self._sm_scale, self._sliding_window, self._logits_soft_cap = sm_scale, sliding_window, logits_soft_cap
        self._added: list[tuple[PagedKV, int, AttentionRows]] = []

    def add(self, source: PagedKV, splits: int | None = None, rows: AttentionRows | None = None) -> None:
        """Add a source. ``rows`` overrides KV lengths and positions; position 0 is the source's first key."""
        mine = rows or self._rows
        kv_heads = source.keys.shape[0]
        if splits is None:
            packed, few = mine.max_q_len * self._query.shape[1] // kv_heads, self._is_few(source, mine)
            tiles = -(-packed // ROWS) * kv_heads * mine.sequences
            splits = splits_for(tiles, mine.max_kv_len, _processors(self._query), _FEW_BLOCKS if few else 2)
        self._added.append((source, splits, mine))

    def _is_few(self, source: PagedKV, rows: AttentionRows) -> bool:
        """Return True if the kernel for few rows per KV head serves a source."""
        return rows.max_q_len * self._query.shape[1] // source.keys.shape[0] <= FEW_ROWS

    def combined(self) -> tuple[Tensor, Tensor]:
        """Launch the kernels and return output and log-sum-exp over all sources."""
        query = self._query
        count, heads, dim = query.shape
        output = torch.empty(count, heads, dim, dtype=query.dtype, device=query.device)
        lse = torch.empty(count, heads, dtype=torch.float32, device=query.device)
        parts = sum(splits for _, splits, _ in self._added)
        if parts == 1:
            source, splits, rows = self._added[0]
            self._launch(source, splits, rows, 0, output, lse, None, None)
            return output, lse
        part_output = torch.empty(parts, count, heads, dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(parts, count, heads, dtype=torch.float32, device=query.device)
        first = 0
        for source, splits, rows in self._added:
            self._launch(source, splits, rows, first, None, None, part_output, part_lse)
            first += splits
        return combine(self._kernels, part_output, part_lse, output, lse)

    def _launch(
        self,
        source: PagedKV,
        splits: int,
        rows: AttentionRows,
        first_part: int,
        output: Tensor | None,
        lse: Tensor | None,
        part_output: Tensor | None,
        part_lse: Tensor | None,
    ) -> None:
        query, name = self._query, type_name(self._query.dtype)
        count, heads, dim = query.shape
        kv_heads = source.keys.shape[0]
        params = _AttentionParams(
            query=pointer(query),
            keys=pointer(source.keys),
            values=pointer(source.values),
            output=pointer(output),
            lse=pointer(lse),
            part_output=pointer(part_output),
            part_lse=pointer(part_lse),
            qo_indptr=pointer(rows.qo_indptr),
            kv_lens=pointer(rows.kv_lens),
            positions=pointer(rows.positions),
            first_slot=pointer(source.first_slot),
            pages=pointer(source.pages),
            query_row_stride=query.stride(0),
            kv_head_stride=source.keys.stride(0),
            rows=count,
            heads=heads,
            kv_heads=kv_heads,
            splits=splits,
            first_part=first_part,
            sliding_window=self._sliding_window,
            sm_scale=self._sm_scale,
            logits_soft_cap=self._logits_soft_cap,
        )
        if source.pages is not None:
            params.max_pages, params.page_shift = source.pages.shape[1], source.page_tokens.bit_length() - 1
        kernel = f"attention_{'few_' if self._is_few(source, rows) else ''}pool_{name}_{dim}"
        grid = (-(-rows.max_q_len * (heads // kv_heads) // ROWS), kv_heads, rows.sequences * splits)
        self._kernels.launch(kernel, grid, THREADS, shared_bytes(dim), params, stream_of(query))


def shared_bytes(dim: int) -> int:
    """Return the shared memory of a block: a tile of keys, one of values and, beyond 128 channels, the query."""
    keys = 32 if dim > 128 else 64
    return 2 * (dim + 8) * (2 * keys + (ROWS if dim > 128 else 0))


def combine(
    kernels: Kernels, part_output: Tensor, part_lse: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge parts ``[parts, rows, heads, dim]`` by log-sum-exp ``[parts, rows, heads]`` into ``output`` and ``lse``."""
    parts, count, heads, dim = part_output.shape
    params = _CombineParams(
        part_output=pointer(part_output),
        part_lse=pointer(part_lse),
        output=pointer(output),
        lse=pointer(lse),
        parts=parts,
        rows_heads=count * heads,
        dim=dim,
    )
    grid, shared = (count * heads, 1, 1), 4 * 8 * -(-parts // 8)  # the compiler reads up to 8 weights at a time
    kernels.launch(f"combine_{type_name(output.dtype)}", grid, THREADS, shared, params, stream_of(output))
    return output, lse


def _processors(tensor: Tensor) -> int:
    return device_of(tensor.device).facts.multiprocessors if is_device(tensor.device) else 1
