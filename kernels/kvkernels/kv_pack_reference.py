"""KV quantization and packing in plain torch, for any device and dtype: the test oracle.

Quantization is asymmetric with a zero point: keys per channel over groups of tokens, values per token, because keys
have their outliers in channels and values in tokens (KIVI, arXiv:2402.02750).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]


def _stored(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a section as a tensor of the pool's dtype.

    It shares the memory unless that is read-only.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _take(pool: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens of the pool as ``[layers, tokens, heads, dim]`` on the CPU."""
    return pool.index_select(2, slots.to(pool.device)).transpose(1, 2).to("cpu")


def _quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize along ``dim``: codes (uint8), and scale and zero without that dimension."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes = torch.round((x - low) * inverse).clamp_(0, 2**bits - 1).to(torch.uint8)
    return codes, scale.squeeze(dim), low.squeeze(dim)


def _nibbles(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unnibble(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, arrays: Arrays) -> None:
    """Pack tokens of the pool into a payload's arrays; see ``dispatch.pack_chunk``."""
    k, v = _take(keys, slots), _take(values, slots)
    if header.bits == 16:
        _stored(arrays["keys"], k.dtype).copy_(k)
        _stored(arrays["values"], v.dtype).copy_(v)
        return
    sinks, bits = header.sink_tokens, header.bits
    _stored(arrays["sink_keys"], k.dtype).copy_(k[:, :sinks])
    _stored(arrays["sink_values"], v.dtype).copy_(v[:, :sinks])
    k, v = k.float(), v.float()
    for group, start in enumerate(range(0, len(slots), header.key_group_tokens)):
        # Sink tokens are outliers and stored unquantized, so they must not widen the scale of the other tokens.
        rest = slice(max(start, sinks), start + header.key_group_tokens)
        part = slice(start, start + header.key_group_tokens)
        source = k[:, rest] if k[:, rest].shape[1] else k[:, part]
        _, scale, zero = _quantize(source, 1, bits)
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        codes = torch.round((k[:, part] - zero[:, None]) * inverse[:, None]).clamp_(0, 2**bits - 1).to(torch.uint8)
        arrays["keys"][:, part] = (_nibbles(codes) if bits == 4 else codes).numpy()
        arrays["key_scale"][:, group], arrays["key_zero"][:, group] = scale.numpy(), zero.numpy()
    codes, scale, zero = _quantize(v, 3, bits)
    arrays["values"][:] = (_nibbles(codes) if bits == 4 else codes).numpy()
    arrays["value_scale"][:], arrays["value_zero"][:] = scale.numpy(), zero.numpy()


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a RoPE shift to keys ``[..., head_dim]`` (float32); ``cos`` and ``sin`` are ``[rotary_dim / 2]``."""
    half = cos.shape[0]
    a, b, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def unpack(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    arrays: Arrays,
    rotation: tuple[NDArray[Any], NDArray[Any]] | None,
    layers: range,
) -> None:
    """Unpack a payload's arrays into the pool; see ``dispatch.unpack_chunk``."""
    count, where = len(slots), slots.to(keys.device)
    device, dtype = keys.device, keys.dtype
    chosen = slice(layers.start, layers.stop)
    if header.bits == 16:
        k, v = (_stored(arrays[name][chosen, :count], dtype).to(device) for name in ("keys", "values"))
    else:

        def load(name: str, part: Any = np.s_[:]) -> Tensor:
            return torch.from_numpy(np.array(arrays[name][chosen, part])).to(device)

        first = np.s_[:count]
        codes_k, codes_v = load("keys", first), load("values", first)
        if header.bits == 4:
            codes_k, codes_v = _unnibble(codes_k), _unnibble(codes_v)
        group = torch.arange(count, device=device) // header.key_group_tokens
        k = codes_k.float() * load("key_scale")[:, group] + load("key_zero")[:, group]
        v = codes_v.float() * load("value_scale", first)[..., None] + load("value_zero", first)[..., None]
        v = v.to(dtype)
        sinks = min(header.sink_tokens, count)
        k[:, :sinks] = _stored(arrays["sink_keys"][chosen, :sinks], dtype).to(device).float()
        v[:, :sinks] = _stored(arrays["sink_values"][chosen, :sinks], dtype).to(device)
    if rotation is not None:
        cos, sin = (torch.from_numpy(x).to(device) for x in rotation)
        k = rotate(k.float(), cos, sin)
    keys[chosen].index_copy_(2, where, k.to(dtype).transpose(1, 2))
    values[chosen].index_copy_(2, where, v.transpose(1, 2))
