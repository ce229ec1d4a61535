"""KV quantization and packing on the CPU: one fused pass over chunks and layers.

Runs on all cores (``kernels/cpu/kv_pack.cpp``). Eager torch needs a dozen passes over the data.
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

from kvkernels.chunk_payload import Array, ChunkPlacement
from kvkernels.cpu.cpu_library import Kernel, KernelLibrary, loaded_library
from kvkernels.cpu.thread_pool import PARALLEL_COPY_BYTES, num_own_threads

_MAX_DIM = 1024
# Like PARALLEL_COPY_BYTES, for quantization, which takes ten times as long as a copy or as dequantization.
_PARALLEL_QUANTIZE_BYTES = 1 << 18
_SECTIONS = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "sink_keys", "sink_values")


class _Chunk(ctypes.Structure):
    """``Chunk`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", *_SECTIONS, "cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("tokens", "chunk_tokens", "bits", "group_tokens", "sink_tokens", "half")),
    )


class _Job(ctypes.Structure):
    """``KvPackJob`` in jobs.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
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
def _kernel(library: KernelLibrary, name: str) -> Kernel:
    if library.number("chunk_bytes") != ctypes.sizeof(_Chunk):
        raise RuntimeError(f"{library.name}'s chunk has another size: run python -m kvkernels.cpu")
    return library.kernel(name, _Job)


def serves(pool: Tensor) -> bool:
    """Return True if the kernels support ``pool [layers, kv_heads, slots, dim]``."""
    suits = pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16) and pool.shape[3] <= _MAX_DIM
    return suits and pool[0, 0].is_contiguous() and loaded_library().library is not None


def describe() -> str:
    """Describe the implementation in use, in one line."""
    return (
        f"ours, {loaded_library().why}; f32, bf16"
        if loaded_library().library
        else f"torch reference ({loaded_library().why})"
    )


class _ChunkCopy:
    """Pack or unpack kernel over chunks in host memory; keeps the memory that it reads alive."""

    def __init__(self, name: str, keys: Tensor, values: Tensor, pieces: Sequence[ChunkPlacement]) -> None:
        library = loaded_library().library
        assert library is not None, "serves() says whether there are kernels"
        self._kernel = _kernel(library, name)
        self._held: list[Any] = [keys, values]
        chunks = (_Chunk * len(pieces))(*(self._chunk(piece) for piece in pieces))
        self._held.append(chunks)
        tokens = sum(len(piece.slots) for piece in pieces)
        quantizes = name == "kv_pack" and any(piece.header.bits < 16 for piece in pieces)
        self._parallel_bytes = _PARALLEL_QUANTIZE_BYTES if quantizes else PARALLEL_COPY_BYTES
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
        job.next_item, job.first_layer, job.layers = 0, layers.start, len(layers)
        parallel = self._layer_bytes * len(layers) >= self._parallel_bytes
        self._kernel.run_on_own_threads(job, num_own_threads() if parallel else 1)

    def _chunk(self, piece: ChunkPlacement) -> _Chunk:
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


class ChunkUnpacker(_ChunkCopy):
    """Dequantizes chunks into the pool, layer by layer.

    Call it with the next layers. Releases the GIL.
    """

    def __init__(self, keys: Tensor, values: Tensor, pieces: Sequence[ChunkPlacement]) -> None:
        """Prepare the chunks. Raises ValueError for payloads in device memory."""
        super().__init__("kv_unpack", keys, values, pieces)


def pack(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview) -> None:
    """Quantize tokens into a chunk's payload; see ``dispatch.pack_chunk``."""
    _ChunkCopy("kv_pack", keys, values, [ChunkPlacement(header, payload, slots)])(range(header.layers))
