"""Which implementation runs: one table, visible in ``kvsidecar doctor``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.layout import layout_of
from torch import Tensor

from kvkernels import compiled, cpu, cpu_attention, reference
from kvkernels.compiled import Array
from kvkernels.native import chunks, visible
from kvkernels.native.attention import HEAD_DIMS
from kvkernels.native.library import Kernels
from kvkernels.native.select import kernels_for, takes
from kvkernels.payload import Payload


@dataclass(frozen=True)
class Implementation:
    """One row of the dispatch table."""

    op: str
    device: str
    name: str


def implementations() -> tuple[Implementation, ...]:
    """The table: what each op runs on the CPU, and on each CUDA device that torch sees."""
    fused = "numba, fused" if compiled.AVAILABLE else "torch reference (numba is not installed)"
    out = [
        Implementation("attention", "cpu", cpu_attention.about()),
        Implementation("pack_chunk, unpack_chunk", "cpu", fused),
    ]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        major, minor = torch.cuda.get_device_capability(device)
        where, choice = f"{device} (sm_{major}{minor})", kernels_for(device)
        ours = f"ours, {choice.why}"
        types = "f16, bf16" if takes(device, torch.bfloat16) else "f16"
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


def _fused(pool: Tensor) -> bool:
    return compiled.AVAILABLE and pool.device.type == "cpu" and pool.dtype in (torch.float32, torch.bfloat16)


def _native(pool: Tensor, half: int) -> Kernels | None:
    """Our CUDA kernels, when they move such a pool's heads, turning ``half`` pairs of channels."""
    if pool.device.type != "cuda" or pool.dtype not in (torch.float16, torch.bfloat16):
        return None
    return kernels_for(pool.device).kernels if chunks.takes(pool.shape[3], half) else None


@cache
def _copy_stream(device: torch.device) -> Any:
    cuda: Any = torch.cuda
    return cuda.Stream(device)


@contextlib.contextmanager
def _on_copy_stream(device: torch.device) -> Iterator[None]:
    """Work in the block goes beside the forward's, after what that has enqueued so far; it is done at the end."""
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pack_chunk(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: Payload) -> None:
    """Writes tokens of the pool into a chunk's payload, quantizing as the header says.

    ``keys`` and ``values`` are ``[layers, kv_heads, pool_tokens, head_dim]``; ``slots`` int64 ``[tokens]`` on the
    CPU. ``payload`` is the slot's memory, ``header.payload_bytes`` long, owned by the caller. Returns when the
    bytes are there. Raises ValueError for a payload in device memory that only kernels could write, without any.
    """
    kernels = _native(keys, 0)
    if kernels is not None:
        with visible.using(payload) as address:
            if address is not None:
                with _on_copy_stream(keys.device):
                    chunks.pack(kernels, keys, values, slots.to(keys.device), header, address)
                return
    arrays = layout_of(header).arrays(_on_host(payload))
    if _fused(keys):
        cpu.pack(keys, values, slots, header, arrays)
    else:
        reference.pack(keys, values, slots, header, arrays)


def unpack_chunk(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    payload: Payload,
    rotation: tuple[Array, Array] | None = None,
    layers: range | None = None,
) -> None:
    """Writes the first ``len(slots)`` tokens of a chunk into the pool, dequantizing. The inverse of ``pack_chunk``.

    ``rotation`` is the cosine and sine ``[rotary_dim / 2]`` (float32) of the angles by which keys are turned further,
    in float32, before they are rounded to the pool's dtype: ``RoPE`` in the rotate-half convention, channel i with
    channel ``i + rotary_dim / 2``. ``layers`` limits the work to some layers. Returns when the pool holds them.
    """
    chosen = range(header.layers) if layers is None else layers
    kernels = _native(keys, 0 if rotation is None else len(rotation[0]))
    if kernels is not None:
        with visible.using(payload) as address:
            if address is not None:
                with _on_copy_stream(keys.device):
                    angles = None if rotation is None else _angles(rotation, keys.device)
                    chunks.unpack(kernels, keys, values, slots.to(keys.device), header, address, angles, chosen)
                return
    arrays = layout_of(header).arrays(_on_host(payload))
    if _fused(keys):
        cpu.unpack(keys, values, slots, header, arrays, rotation, chosen)
    else:
        reference.unpack(keys, values, slots, header, arrays, rotation, chosen)


def _on_host(payload: Payload) -> memoryview:
    if isinstance(payload, memoryview):
        return payload
    raise ValueError("the payload is in device memory, and no kernel for this pool can reach it")


def _angles(rotation: tuple[Array, Array], device: torch.device) -> tuple[Tensor, Tensor]:
    cosine, sine = (torch.from_numpy(x).to(device) for x in rotation)
    return cosine, sine
