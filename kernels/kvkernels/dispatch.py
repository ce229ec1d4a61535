"""Kernel dispatch by device and dtype; ``kvsidecar doctor`` prints the table."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache

import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels import kv_pack_reference
from kvkernels.chunk_payload import Array, Arrays, ChunkPlacement, LoadedLayers, Payload
from kvkernels.cpu import bf16_gemv as cpu_products
from kvkernels.cpu import cpu_attention, large_pages
from kvkernels.cpu import f32_gemm as cpu_dense
from kvkernels.cpu import kv_pack as cpu_chunks
from kvkernels.cpu import quantized_gemm as cpu_quantized
from kvkernels.cuda import cuda_kv_pack, imported_memory
from kvkernels.cuda.chunk_transfer import ChunkTransfer
from kvkernels.cuda.cuda_attention import HEAD_DIMS
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import kernels_for, supports
from kvkernels.device.visible_devices import cuda_devices, device_of, is_device


@dataclass(frozen=True)
class Implementation:
    """Row of the dispatch table."""

    op: str
    device: str
    name: str


def implementations() -> tuple[Implementation, ...]:
    """Return the dispatch table for the CPU and for each CUDA device visible to torch."""
    out = [
        Implementation("attention", "cpu", cpu_attention.describe()),
        Implementation("pack_chunk, unpack_chunks", "cpu", cpu_chunks.describe()),
        Implementation("products in float32", "cpu", cpu_dense.describe()),
        Implementation("products of few rows in bfloat16", "cpu", cpu_products.describe()),
        Implementation("products at 4 and 8 bits", "cpu", cpu_quantized.describe()),
        Implementation("memory pages of weights and pool", "cpu", large_pages.describe()),
    ]
    devices = cuda_devices()
    for device in devices:
        major, minor = device_of(device).facts.capability
        where, choice = f"{device} (sm_{major}{minor})", kernels_for(device)
        ours = f"ours, {choice.why}"
        types = "f16, bf16" if supports(device, torch.bfloat16) else "f16"
        dims = ", ".join(map(str, HEAD_DIMS))
        if choice.kernels is None:
            out.append(Implementation("all", where, f"torch ({choice.why})"))
            continue
        out += [
            Implementation("attention", where, f"{ours}; {types}, head dims {dims}; others torch SDPA"),
            Implementation("pack_chunk, unpack_chunks", where, f"{ours}; {types}; others torch reference"),
            Implementation("awq_gemm", where, f"{ours}; {types}, up to 16 rows; more rows torch"),
        ]
    if not devices:
        out.append(Implementation("all", "cuda", f"none: {kernels_for(torch.device('cpu')).why}"))
    return tuple(out)


def _cuda_kernels(pool: Tensor, half: int) -> Kernels | None:
    """Return our CUDA kernels if they support the pool's heads and the RoPE shift.

    The shift rotates ``half`` channel pairs.
    """
    if not is_device(pool.device) or pool.dtype not in (torch.float16, torch.bfloat16):
        return None
    return kernels_for(pool.device).kernels if cuda_kv_pack.supports(pool.shape[3], half) else None


@cache
def _transfer(device: torch.device, use: str) -> ChunkTransfer:
    """Return a device's transfer; each ``use`` has its own transfer, so stores do not wait for loads."""
    return ChunkTransfer(device_of(device))


def pack_chunk(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: Payload) -> None:
    """Pack tokens of the pool into a chunk's payload, quantized as the header specifies.

    ``keys`` and ``values`` are ``[layers, kv_heads, pool_tokens, head_dim]``; ``slots`` int64 ``[tokens]`` on the
    CPU. ``payload`` is ``header.payload_bytes`` long and owned by the caller. Returns when the bytes are written.
    Raises ValueError for a payload in device memory.
    """
    if not isinstance(payload, memoryview):
        raise ValueError("the payload is in device memory; chunks are packed into host memory")
    kernels = _cuda_kernels(keys, 0)
    if kernels is not None:
        _transfer(keys.device, "pack").pack(kernels, keys, values, slots, header, payload)
        return
    if cpu_chunks.serves(keys):
        cpu_chunks.pack(keys, values, slots, header, payload)
    else:
        kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(payload))


def unpack_chunk(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    payload: Payload,
    rotation: tuple[Array, Array] | None = None,
    layers: range | None = None,
) -> None:
    """Dequantize one chunk into the pool: the inverse of ``pack_chunk``.

    ``layers`` restricts the work to some layers. Returns when the pool holds them.
    """
    chosen = range(header.layers) if layers is None else layers
    for loaded in unpack_chunks(keys, values, [ChunkPlacement(header, payload, slots, rotation)], [chosen]):
        loaded.wait()


def unpack_chunks(
    keys: Tensor, values: Tensor, pieces: Sequence[ChunkPlacement], groups: Sequence[range]
) -> Generator[LoadedLayers, None, None]:
    """Dequantize chunks into the pool, one group of layers at a time.

    On the CPU, yields each group once the pool contains it. On a device, yields each group once its work is enqueued; a
    stream or thread that reads the pool must wait for the group's event. Payloads in host memory may be freed after the
    last group.
    """
    if cpu_chunks.serves(keys):
        unpackers = [(some[0], cpu_chunks.ChunkUnpacker(keys, values, some)) for some in _by_layers(pieces)]
        for layers in groups:
            for piece, unpacking in unpackers:
                for run in piece.runs_in(layers):
                    unpacking(run)
            yield LoadedLayers(layers)
        return
    ours = [piece for piece in pieces if _kernels_of(keys, piece) is not None]
    others = [(p, layout_of(p.header).arrays(_on_host(p.payload))) for p in pieces if _kernels_of(keys, p) is None]
    kernels = _kernels_of(keys, ours[0]) if ours else None
    unpacked: Generator[LoadedLayers, None, None] = (LoadedLayers(layers) for layers in groups)
    if kernels is not None:
        unpacked = _transfer(keys.device, "unpack").unpack(kernels, keys, values, ours, groups)
    with closing(unpacked):
        for loaded in unpacked:
            yield _unpacked_by_torch(keys, values, others, loaded) if others else loaded


def _by_layers(pieces: Sequence[ChunkPlacement]) -> list[list[ChunkPlacement]]:
    """Group pieces by the layers that get them."""
    found: dict[frozenset[int] | None, list[ChunkPlacement]] = {}
    for piece in pieces:
        found.setdefault(piece.layers, []).append(piece)
    return list(found.values())


def _unpacked_by_torch(
    keys: Tensor, values: Tensor, pieces: Sequence[tuple[ChunkPlacement, Arrays]], loaded: LoadedLayers
) -> LoadedLayers:
    """Unpack further pieces into loaded layers, on the current stream."""
    for piece, arrays in pieces:
        for run in piece.runs_in(loaded.layers):
            kv_pack_reference.unpack(keys, values, piece.slots, piece.header, arrays, piece.rotation, run)
    if not is_device(keys.device):
        return loaded
    device = device_of(keys.device)
    ready, stream = device.event(), device.current_stream()
    if loaded.ready is not None:
        stream.wait(loaded.ready)
    ready.record(stream)  # the reader may use another stream
    return LoadedLayers(loaded.layers, ready)


def _kernels_of(keys: Tensor, piece: ChunkPlacement) -> Kernels | None:
    return _cuda_kernels(keys, 0 if piece.rotation is None else len(piece.rotation[0]))


def _on_host(payload: Payload) -> memoryview:
    return payload if isinstance(payload, memoryview) else imported_memory.read_to_host(payload)
