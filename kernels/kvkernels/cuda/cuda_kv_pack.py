"""KV quantization and packing on CUDA: pool to and from device-addressable payloads.

A payload is a slot of the GPU arena or pinned host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import layout_of
from torch import Tensor

from kvkernels.cuda.cuda_library import Kernels, pointer, stream_of, type_name

_THREADS = 128


class _KvPackParams(ctypes.Structure):
    """``KvPackParams`` in cuda/kv_pack.cu."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("pool_keys", "pool_values", "slots", "payload")),
        *((n, ctypes.c_int64) for n in ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero")),
        *((n, ctypes.c_int64) for n in ("sink_keys", "sink_values", "layer_stride", "head_stride")),
        *((n, ctypes.c_void_p) for n in ("cosine", "sine")),
        *((n, ctypes.c_int) for n in ("first_layer", "chunk_tokens", "tokens", "heads", "dim")),
        *((n, ctypes.c_int) for n in ("group_tokens", "sink_tokens", "half")),
    )


def supports(head_dim: int, rotary_half: int = 0) -> bool:
    """Return True if the kernels support a head dim and a RoPE shift.

    They process four channels at a time.
    """
    return head_dim % 8 == 0 and head_dim <= 256 and rotary_half % 4 == 0


def _params(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: int) -> _KvPackParams:
    params = _KvPackParams(
        pool_keys=pointer(keys),
        pool_values=pointer(values),
        slots=pointer(slots),
        payload=payload,
        layer_stride=keys.stride(0),
        head_stride=keys.stride(1),
        chunk_tokens=header.token_count,
        tokens=len(slots),
        heads=header.kv_heads,
        dim=header.head_dim,
        group_tokens=header.key_group_tokens,
        sink_tokens=header.sink_tokens,
    )
    for section in layout_of(header).sections:
        setattr(params, section.name, section.offset)
    return params


def pack(kernels: Kernels, keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, payload: int) -> None:
    """Enqueue packing of the pool's tokens at ``slots`` into a payload.

    ``slots`` are int64, on the device; ``payload`` is a device address. The bytes are valid once the stream has
    executed the work.
    """
    params, name = _params(keys, values, slots, header, payload), type_name(keys.dtype)
    tokens, heads, layers, stream = len(slots), header.kv_heads, header.layers, stream_of(keys)
    if header.bits == 16:
        units = tokens * header.head_dim // 4
        kernels.launch(f"pack_whole_{name}", (-(-units // _THREADS), heads, layers), _THREADS, 0, params, stream)
        return
    groups, threads = -(-tokens // header.key_group_tokens), -(-header.head_dim // 32) * 32
    kernels.launch(f"pack_keys{header.bits}_{name}", (groups, heads, layers), threads, 0, params, stream)
    grid = (-(-tokens * heads // 4), 1, layers)
    kernels.launch(f"pack_values{header.bits}_{name}", grid, _THREADS, 0, params, stream)


def unpack(
    kernels: Kernels,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    payload: int,
    rotation: tuple[Tensor, Tensor] | None,
    layers: range,
    offsets: Mapping[str, int] | None = None,
) -> None:
    """Enqueue unpacking of the first ``len(slots)`` tokens of a payload into the pool.

    ``payload`` is a device address. ``rotation`` is a RoPE shift of the keys: cosine and sine ``[rotary_dim / 2]``,
    float32, on the device. ``offsets`` are those of the payload's sections, if they are not the layout's.
    """
    params = _params(keys, values, slots, header, payload)
    params.first_layer = layers.start
    for name, offset in (offsets or {}).items():
        setattr(params, name, offset)
    if rotation is not None:
        params.cosine, params.sine, params.half = pointer(rotation[0]), pointer(rotation[1]), len(rotation[0])
    per_block = _THREADS // (header.head_dim // 8)
    grid = (-(-len(slots) // per_block), header.kv_heads, len(layers))
    kernels.launch(f"unpack{header.bits}_{type_name(keys.dtype)}", grid, _THREADS, 0, params, stream_of(keys))
