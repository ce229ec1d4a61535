"""The chunk kernels on the CPU: one fused pass over many chunks and layers, on all cores (``kernels/cpu/chunks.cpp``).

Eager torch needs a dozen passes over the data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels.chunk_payload import Array, Piece
from kvkernels.cpu.cpu_library import Kernel, Library, found
from kvkernels.cpu.thread_pool import own_count

_MAX_DIM = 1024
# With less to move, waking other threads costs more than it saves.
_PARALLEL_BYTES = 1 << 18
_SECTIONS = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "sink_keys", "sink_values")


class _Chunk(ctypes.Structure):
    """``Chunk`` in chunks.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", *_SECTIONS, "cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("tokens", "chunk_tokens", "bits", "group_tokens", "sink_tokens", "half")),
    )


class _Job(ctypes.Structure):
    """``Job`` in chunks.cpp."""

    _fields_ = (
        ("taken", ctypes.c_int64),
        ("chunks", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("layer_stride", "head_stride", "first_layer", "layers", "heads", "dim", "of_bf16")
        ),
    )


@cache
def _kernel(library: Library, name: str) -> Kernel:
    if library.number("chunk_bytes") != ctypes.sizeof(_Chunk):
        raise RuntimeError(f"{library.name}'s chunks are others: run python -m kvkernels.cpu")
    return library.kernel(name, _Job)


def serves(pool: Tensor) -> bool:
    """Whether the kernels move tokens of ``pool [layers, kv_heads, slots, dim]``."""
    suits = pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16) and pool.shape[3] <= _MAX_DIM
    return suits and pool[0, 0].is_contiguous() and found().library is not None


def about() -> str:
    """A line on what serves here."""
    return f"ours, {found().why}; f32, bf16" if found().library else f"torch reference ({found().why})"


class _Moving:
    """A kernel over chunks in host memory, and what it reads, kept alive."""

    def __init__(self, name: str, keys: Tensor, values: Tensor, pieces: Sequence[Piece]) -> None:
        library = found().library
        assert library is not None, "serves() says whether there are kernels"
        self._kernel = _kernel(library, name)
        self._held: list[Any] = [keys, values]
        chunks = (_Chunk * len(pieces))(*(self._chunk(piece) for piece in pieces))
        self._held.append(chunks)
        tokens = sum(len(piece.slots) for piece in pieces)
        self._layer_bytes = 2 * tokens * keys.shape[1] * keys.shape[3] * keys.element_size()
        self._job = _Job(
            chunks=ctypes.addressof(chunks),
            count=len(pieces),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_stride=keys.stride(0),
            head_stride=keys.stride(1),
            heads=keys.shape[1],
            dim=keys.shape[3],
            of_bf16=keys.dtype == torch.bfloat16,
        )

    def __call__(self, layers: range) -> None:
        job = self._job
        job.taken, job.first_layer, job.layers = 0, layers.start, len(layers)
        parallel = self._layer_bytes * len(layers) >= _PARALLEL_BYTES
        self._kernel.apart(job, own_count() if parallel else 1)

    def _chunk(self, piece: Piece) -> _Chunk:
        header, layout = piece.header, layout_of(piece.header)
        if not isinstance(piece.payload, memoryview) or piece.payload.nbytes < layout.size_bytes:
            raise ValueError(f"the payload of {header.token_count} tokens is not {layout.size_bytes} bytes of memory")
        memory: Array = np.frombuffer(piece.payload, np.uint8)
        slots = piece.slots.contiguous()
        chunk = _Chunk(
            slots=slots.data_ptr(),
            tokens=len(slots),
            chunk_tokens=header.token_count,
            bits=header.bits,
            group_tokens=header.key_group_tokens,
            sink_tokens=header.sink_tokens,
        )
        for section in layout.sections:
            setattr(chunk, section.name, memory.ctypes.data + section.offset)
        if piece.rotation is not None:
            cosine, sine = (np.ascontiguousarray(x, np.float32) for x in piece.rotation)
            chunk.cosine, chunk.sine, chunk.half = cosine.ctypes.data, sine.ctypes.data, len(cosine)
            self._held += [cosine, sine]
        self._held += [memory, slots]
        return chunk


class Unpacking(_Moving):
    """Chunks on their way to the pool: call it with the layers that are wanted next. Releases the GIL."""

    def __init__(self, keys: Tensor, values: Tensor, pieces: Sequence[Piece]) -> None:
        """Raises ValueError for payloads in device memory."""
        super().__init__("unpack", keys, values, pieces)


def pack(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview) -> None:
    """See ``dispatch.pack_chunk``."""
    _Moving("pack", keys, values, [Piece(header, payload, slots)])(range(header.layers))
