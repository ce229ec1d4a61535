"""What to launch for attention: variant, grid, splits, workspace."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name

HEAD_DIMS = (64, 96, 128, 256)
THREADS, ROWS = 128, 64


class _AttentionParams(ctypes.Structure):
    """``AttentionParams`` of cuda/attention_params.h."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("query", "keys", "values", "output", "lse", "part_output", "part_lse")),
        *((n, ctypes.c_void_p) for n in ("row_start", "key_count", "positions", "first_slot", "pages")),
        *((n, ctypes.c_void_p) for n in ("chunks", "chunk_start")),
        *((n, ctypes.c_int64) for n in ("query_row_stride", "kv_head_stride")),
        *((n, ctypes.c_int) for n in ("rows", "heads", "kv_heads", "max_pages", "page_shift")),
        *((n, ctypes.c_int) for n in ("splits", "first_part", "window")),
        *((n, ctypes.c_float) for n in ("scale", "softcap")),
    )


class _CombineParams(ctypes.Structure):
    """``CombineParams`` of cuda/attention_params.h."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("part_output", "part_lse", "output", "lse")),
        *((n, ctypes.c_int) for n in ("parts", "rows_heads", "dim", "reserved")),
    )


_CHUNK = np.dtype(
    [
        ("payload", "<u8"),
        *((n, "<i8") for n in ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero")),
        *((n, "<i8") for n in ("sink_keys", "sink_values")),
        *((n, "<i4") for n in ("first_token", "key_group_tokens", "sink_tokens", "reserved")),
    ]
)


@dataclass(frozen=True)
class Rows:
    """The rows of a call, by sequence: ``row_start [sequences + 1]``, ``key_count [sequences]``, ``positions [rows]``
    or none when a sequence's rows are its last, all int32 on the device. ``longest``, ``most_keys`` bound the grid."""

    row_start: Tensor
    key_count: Tensor
    positions: Tensor | None
    longest: int
    most_keys: int

    @property
    def sequences(self) -> int:
        return int(self.key_count.shape[0])


@dataclass(frozen=True)
class InPool:
    """Keys and values ``[kv_heads, slots, dim]``: ``first_slot [sequences]`` when each lies in one piece, else
    ``pages [sequences, max_pages]`` of ``page_tokens`` (a power of two), int32."""

    keys: Tensor
    values: Tensor
    first_slot: Tensor | None = None
    pages: Tensor | None = None
    page_tokens: int = 1


@dataclass(frozen=True)
class InChunks:
    """Keys and values of one layer, as quantized chunks: a table made by ``chunk_table``, and where each sequence's
    chunks begin in it, int32 ``[sequences + 1]``."""

    table: Tensor
    start: Tensor
    bits: int
    kv_heads: int


def chunk_table(
    chunks: Sequence[tuple[ChunkHeader, int, int]], layer: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The kernels' table of one layer of chunks, each given as ``(header, address of its payload, first token)``."""
    table = np.zeros(len(chunks), _CHUNK)
    for row, (header, payload, first) in zip(table, chunks, strict=True):
        row["payload"], row["first_token"] = payload, first
        row["key_group_tokens"], row["sink_tokens"] = header.key_group_tokens, header.sink_tokens
        for section in layout_of(header).sections:
            row[section.name] = section.offset + layer * (section.size_bytes // header.layers)
    return torch.from_numpy(table.view(np.uint8)).to(device)


def splits_for(tiles: int, most_keys: int, processors: int) -> int:
    """Parts into which keys are split so that every multiprocessor has about two blocks; at least 256 keys each."""
    wanted = -(-2 * processors // max(1, tiles))
    return max(1, min(wanted, most_keys // 256, 64))


def attend(
    kernels: Kernels,
    query: Tensor,
    source: InPool | InChunks,
    rows: Rows,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``query [rows, heads, dim]`` over what ``source`` holds: output of the same shape and log-sum-exp
    ``[rows, heads]`` (float32, natural; -inf where nothing is seen). FlashAttention-2, arXiv:2307.08691."""
    parts = Parts(kernels, query, rows, scale, window, softcap)
    parts.add(source, splits)
    return parts.combined()


class Parts:
    """Attention over several sources, as if their keys stood in one place: add each, then combine."""

    def __init__(
        self, kernels: Kernels, query: Tensor, rows: Rows, scale: float, window: int = 0, softcap: float = 0.0
    ) -> None:
        if query.shape[2] not in HEAD_DIMS:
            raise ValueError(f"head_dim is {query.shape[2]}; kernels take {', '.join(map(str, HEAD_DIMS))}")
        self._kernels, self._query, self._rows = kernels, query, rows
        self._scale, self._window, self._softcap = scale, window, softcap
        self._added: list[tuple[InPool | InChunks, int, Rows]] = []

    def add(self, source: InPool | InChunks, splits: int | None = None, rows: Rows | None = None) -> None:
        """``rows`` where key counts or positions differ for this source: position 0 is the source's first key."""
        mine = rows or self._rows
        kv_heads = source.kv_heads if isinstance(source, InChunks) else source.keys.shape[0]
        if splits is None:
            tiles = -(-mine.longest * self._query.shape[1] // kv_heads // ROWS) * kv_heads * mine.sequences
            splits = splits_for(tiles, mine.most_keys, _processors(self._query))
        self._added.append((source, splits, mine))

    def combined(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over all that was added."""
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
        source: InPool | InChunks,
        splits: int,
        rows: Rows,
        first_part: int,
        output: Tensor | None,
        lse: Tensor | None,
        part_output: Tensor | None,
        part_lse: Tensor | None,
    ) -> None:
        query, name = self._query, type_name(self._query.dtype)
        count, heads, dim = query.shape
        params = _AttentionParams(
            query=pointer(query),
            output=pointer(output),
            lse=pointer(lse),
            part_output=pointer(part_output),
            part_lse=pointer(part_lse),
            row_start=pointer(rows.row_start),
            key_count=pointer(rows.key_count),
            positions=pointer(rows.positions),
            query_row_stride=query.stride(0),
            rows=count,
            heads=heads,
            splits=splits,
            first_part=first_part,
            window=self._window,
            scale=self._scale,
            softcap=self._softcap,
        )
        if isinstance(source, InChunks):
            kernel, kv_heads = f"attention_chunks{source.bits}_{name}_{dim}", source.kv_heads
            params.chunks, params.chunk_start = pointer(source.table), pointer(source.start)
        else:
            kernel, kv_heads = f"attention_pool_{name}_{dim}", source.keys.shape[0]
            params.keys, params.values = pointer(source.keys), pointer(source.values)
            params.kv_head_stride = source.keys.stride(0)
            params.first_slot, params.pages = pointer(source.first_slot), pointer(source.pages)
            if source.pages is not None:
                params.max_pages, params.page_shift = source.pages.shape[1], source.page_tokens.bit_length() - 1
        params.kv_heads = kv_heads
        grid = (-(-rows.longest * (heads // kv_heads) // ROWS), kv_heads, rows.sequences * splits)
        self._kernels.launch(kernel, grid, THREADS, shared_bytes(dim), params, stream_of(query))


def shared_bytes(dim: int) -> int:
    """Shared memory of a block: a tile of keys and one of values; beyond 128 channels the query too."""
    keys = 32 if dim > 128 else 64
    return 2 * (dim + 8) * (2 * keys + (ROWS if dim > 128 else 0))


def combine(
    kernels: Kernels, part_output: Tensor, part_lse: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combines parts ``[parts, rows, heads, dim]`` by their log-sum-exp ``[parts, rows, heads]`` into ``output`` and
    ``lse``, and returns them."""
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
    grid = (-(-count * heads // 4), 1, 1)
    kernels.launch(f"combine_{type_name(output.dtype)}", grid, THREADS, 0, params, stream_of(output))
    return output, lse


def _processors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1
