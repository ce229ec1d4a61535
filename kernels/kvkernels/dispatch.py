"""Kernel dispatch by device and dtype; ``kvsidecar doctor`` prints the table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels import kv_pack_reference
from kvkernels.chunk_payload import Array, ChunkPlacement, Payload
from kvkernels.cpu import bf16_gemv as cpu_products
from kvkernels.cpu import cpu_attention
from kvkernels.cpu import f32_gemm as cpu_dense
from kvkernels.cpu import kv_pack as cpu_chunks
from kvkernels.cpu import quantized_gemm as cpu_quantized
from kvkernels.cuda import cuda_kv_pack, device_visible_memory
from kvkernels.cuda.cuda_attention import HEAD_DIMS
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import kernels_for, supports


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
    ]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        major, minor = torch.cuda.get_device_capability(device)
        where, choice = f"{device} (sm_{major}{minor})", kernels_for(device)
        ours = f"ours, {choice.why}"
        types = "f16, bf16" if supports(device, torch.bfloat16) else "f16"
        dims = ", ".join(map(str, HEAD_DIMS))
        if choice.kernels is None:
            out.append(Implementation("all", where, f"torch ({choice.why})"))
            continue
        out += [
            Implementation("attention", where, f"{ours}; {types}, head dims {dims}; others torch SDPA"),
            Implementation("pack_chunk, unpack_chunk", where, f"{ours}; {types}; others torch reference"),
            Implementation("awq_gemm", where, f"{ours}; {types}, up to 16 rows; more rows torch"),
        ]
    if not devices:
        out.append(Implementation("all", "cuda", f"none: {kernels_for(torch.device('cpu')).why}"))
    return tuple(out)


def _cuda_kernels(pool: Tensor, half: int) -> Kernels | None:
    """Return our CUDA kernels if they support the pool's heads and the RoPE shift.

    The shift rotates ``half`` channel pairs.
    """
    if pool.device.type != "cuda" or pool.dtype not in (torch.float16, torch.bfloat16):
        return None
    return kernels_for(pool.device).kernels if cuda_kv_pack.supports(pool.shape[3], half) else None


@cache
def _copy_stream(device: torch.device) -> Any:
    cuda: Any = torch.cuda
    return cuda.Stream(device)


@contextlib.contextmanager
def _on_copy_stream(device: torch.device) -> Iterator[None]:
    """Run the block's work on a copy stream; synchronize at the end.

    The copy stream waits for the work already enqueued.
    """
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pack_chunk(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: Payload) -> None:
    """Pack tokens of the pool into a chunk's payload, quantized as the header specifies.

    ``keys`` and ``values`` are ``[layers, kv_heads, pool_tokens, head_dim]``; ``slots`` int64 ``[tokens]`` on the
    CPU. ``payload`` is ``header.payload_bytes`` long and owned by the caller. Returns when the bytes are written.
    Raises ValueError for a payload in device memory if no kernel supports the pool.
    """
    kernels = _cuda_kernels(keys, 0)
    if kernels is not None:
        with device_visible_memory.device_address(payload) as address:
            if address is not None:
                with _on_copy_stream(keys.device):
                    cuda_kv_pack.pack(kernels, keys, values, slots.to(keys.device), header, address)
                return
    memory = _on_host(payload)
    if cpu_chunks.serves(keys):
        cpu_chunks.pack(keys, values, slots, header, memory)
    else:
        kv_pack_reference.pack(keys, values, slots, header, layout_of(header).arrays(memory))


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
    for _ in unpack_chunks(keys, values, [ChunkPlacement(header, payload, slots, rotation)], [chosen]):
        pass


def unpack_chunks(
    keys: Tensor, values: Tensor, pieces: Sequence[ChunkPlacement], groups: Sequence[range]
) -> Iterator[range]:
    """Dequantize chunks into the pool, one group of layers at a time.

    Yields each group once the pool contains it.
    """
    if cpu_chunks.serves(keys):
        unpacking = cpu_chunks.ChunkUnpacker(keys, values, pieces)
        for layers in groups:
            unpacking(layers)
            yield layers
        return
    for layers in groups:
        for piece in pieces:
            _unpack(keys, values, piece, layers)
        yield layers


def _unpack(keys: Tensor, values: Tensor, piece: ChunkPlacement, layers: range) -> None:
    rotation, header = piece.rotation, piece.header
    kernels = _cuda_kernels(keys, 0 if rotation is None else len(rotation[0]))
    if kernels is not None:
        with device_visible_memory.device_address(piece.payload) as address:
            if address is not None:
                with _on_copy_stream(keys.device):
                    angles = None if rotation is None else _angles(rotation, keys.device)
                    slots = piece.slots.to(keys.device)
                    cuda_kv_pack.unpack(kernels, keys, values, slots, header, address, angles, layers)
                return
    arrays = layout_of(header).arrays(_on_host(piece.payload))
    kv_pack_reference.unpack(keys, values, piece.slots, header, arrays, rotation, layers)


def _on_host(payload: Payload) -> memoryview:
    if isinstance(payload, memoryview):
        return payload
    raise ValueError("the payload is in device memory, and no kernel for this pool can reach it")


def _angles(rotation: tuple[Array, Array], device: torch.device) -> tuple[Tensor, Tensor]:
    cosine, sine = (torch.from_numpy(x).to(device) for x in rotation)
    return cosine, sine
