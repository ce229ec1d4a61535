"""Piece table: the chunks of one launch of a pack or unpack kernel, as the kernel reads it in device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from numpy.typing import NDArray
from torch import Tensor

THREADS = 128  # of a block
_ALIGNMENT = 64
_OFFSETS = ("slots", "cosine", "sine")
_SECTIONS = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "sink_keys", "sink_values")
_NUMBERS = ("first_layer", "end_layer", "chunk_tokens", "tokens", "group_tokens", "sink_tokens", "half", "unused")
_NO_ROTATION = (np.zeros(0, np.float32),) * 2
# ``KvPiece`` in cuda/kv_pack.cu.
_ROW = np.dtype([*((n, np.int64) for n in (*_OFFSETS, *_SECTIONS)), *((n, np.int32) for n in _NUMBERS)])


@dataclass(frozen=True)
class TablePiece:
    """Some layers of one chunk.

    ``sections`` are the offsets of its sections from the launch's base (the lowest address of its payloads), as if each
    section began with the model's first layer. ``slots`` (int64) and ``rotation`` are on the CPU; see
    ``ChunkPlacement``.
    """

    header: ChunkHeader
    slots: Tensor
    layers: range
    sections: Mapping[str, int]
    rotation: tuple[NDArray[Any], NDArray[Any]] | None = None


def sections_at(header: ChunkHeader, offset: int = 0) -> dict[str, int]:
    """Return the section offsets of a whole payload that begins ``offset`` bytes after the launch's base."""
    return {section.name: offset + section.offset for section in layout_of(header).sections}


class PieceTable:
    """Table of pieces with equal heads and bits: rows, a list of thread blocks, slots and rotations.

    ``channels`` is the number of adjacent channels per thread. If the head's channels allow it, their codes take 16
    bytes, which one access reads.
    """

    def __init__(self, pieces: Sequence[TablePiece], packs: bool = False) -> None:
        first = pieces[0].header
        self.bits, self.heads, self.dim = first.bits, first.kv_heads, first.head_dim
        self.layers = range(min(p.layers.start for p in pieces), max(p.layers.stop for p in pieces))
        halves = [0 if p.rotation is None else len(p.rotation[0]) for p in pieces]
        self.channels = 128 // self.bits
        while any(number % self.channels for number in (self.dim, *halves)):
            self.channels //= 2
        self.rows_per_block = THREADS // (self.dim // self.channels)
        grouped = packs and self.bits != 16
        self._parts: list[tuple[int, NDArray[Any]]] = []
        self._placed: dict[tuple[int, int], int] = {}
        self.size_bytes = _aligned(len(pieces) * _ROW.itemsize)
        rows, blocks = [], []
        for i, (piece, half) in enumerate(zip(pieces, halves, strict=True)):
            header, tokens = piece.header, len(piece.slots)
            slots = self._place(piece.slots.contiguous().numpy())
            cosine, sine = (self._place(np.ascontiguousarray(x, np.float32)) for x in piece.rotation or _NO_ROTATION)
            sections = (piece.sections.get(name, 0) for name in _SECTIONS)
            counts = header.token_count, tokens, header.key_group_tokens, header.sink_tokens
            rows.append((slots, cosine, sine, *sections, piece.layers.start, piece.layers.stop, *counts, half, 0))
            starts = np.arange(0, tokens, header.key_group_tokens if grouped else self.rows_per_block, dtype=np.int32)
            blocks.append(np.stack((np.full_like(starts, i), starts), 1))
        listed = np.concatenate(blocks)
        self.num_blocks, self.blocks_at = len(listed), self._place(listed)
        self._parts.append((0, np.array(rows, _ROW)))

    def _place(self, array: NDArray[Any]) -> int:
        """Reserve memory for an array, once for pieces that share it; return its offset."""
        key = array.ctypes.data, array.nbytes
        if key not in self._placed:
            self._placed[key] = self.size_bytes
            self._parts.append((self.size_bytes, array))
            self.size_bytes = _aligned(self.size_bytes + array.nbytes)
        return self._placed[key]

    def write(self, memory: NDArray[np.uint8]) -> None:
        """Write the table to the first ``size_bytes`` bytes of host memory."""
        for at, array in self._parts:
            memory[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)

    def to(self, device: torch.device) -> Tensor:
        """Return the table in memory of a device, uint8; block until the copy is done."""
        memory = np.zeros(self.size_bytes, np.uint8)
        self.write(memory)
        return torch.from_numpy(memory).to(device)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
