"""Which implementation runs: one table, visible in ``kvsidecar doctor``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.layout import layout_of
from torch import Tensor

from kvkernels import compiled, cpu, reference
from kvkernels.compiled import Array


@dataclass(frozen=True)
class Implementation:
    """One row of the dispatch table."""

    op: str
    device: str
    name: str


def implementations() -> tuple[Implementation, ...]:
    """The table: what each op runs on each device."""
    fused = "numba, fused" if compiled.AVAILABLE else "torch reference (numba is not installed)"
    return (
        Implementation("pack_chunk", "cpu", fused),
        Implementation("unpack_chunk", "cpu", fused),
        Implementation("pack_chunk", "cuda", "torch reference"),
        Implementation("unpack_chunk", "cuda", "torch reference"),
    )


def _fused(pool: Tensor) -> bool:
    return compiled.AVAILABLE and pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16)


def pack_chunk(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: memoryview) -> None:
    """Writes tokens of the pool into a chunk's payload, quantizing as the header says.

    ``keys`` and ``values`` are ``[layers, kv_heads, pool_tokens, head_dim]``; ``slots`` int64 ``[tokens]`` on the
    CPU. ``payload`` is the slot's memory, ``header.payload_bytes`` long, owned by the caller. Returns when the
    bytes are there.
    """
    arrays = layout_of(header).arrays(payload)
    if _fused(keys):
        cpu.pack(keys, values, slots, header, arrays)
    else:
        reference.pack(keys, values, slots, header, arrays)


def unpack_chunk(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    payload: memoryview,
    rotation: tuple[Array, Array] | None = None,
    layers: range | None = None,
) -> None:
    """Writes the first ``len(slots)`` tokens of a chunk into the pool, dequantizing. The inverse of ``pack_chunk``.

    ``rotation`` is the cosine and sine ``[rotary_dim / 2]`` (float32) of the angles by which keys are turned further,
    in float32, before they are rounded to the pool's dtype: ``RoPE`` in the rotate-half convention, channel i with
    channel ``i + rotary_dim / 2``. ``layers`` limits the work to some layers.
    """
    arrays = layout_of(header).arrays(payload)
    chosen = range(header.layers) if layers is None else layers
    if _fused(keys):
        cpu.unpack(keys, values, slots, header, arrays, rotation, chosen)
    else:
        reference.unpack(keys, values, slots, header, arrays, rotation, chosen)
