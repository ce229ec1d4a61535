"""The chunk kernels on the CPU: one fused pass, compiled by numba (its LLVM comes in the wheel).

Eager torch needs a dozen passes over the data: 760 ms for 4k tokens of a 0.5B model where this takes some 15.
Layers are split over a few threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from torch import Tensor

from kvkernels.compiled import Array, Arrays, compiled, over_parts, raw


@compiled
def _read(pool: Any, slot: int, out: Any, out_bits: Any, brain: bool) -> None:
    """A token of ``pool [heads, slots, dim]`` to float32 ``[heads, dim]``; bfloat16 (``brain``) comes as its bits."""
    for h in range(pool.shape[0]):
        row = pool[h, slot]
        for d in range(row.shape[0]):
            if brain:
                out_bits[h, d] = np.uint32(row[d]) << np.uint32(16)
            else:
                out[h, d] = row[d]


@compiled
def _write(x: Any, x_bits: Any, pool: Any, slot: int, brain: bool) -> None:
    """float32 ``[heads, dim]`` to a token of the pool; to bfloat16 rounding to nearest even, as torch does."""
    for h in range(pool.shape[0]):
        row = pool[h, slot]
        for d in range(row.shape[0]):
            if brain:
                b = x_bits[h, d]
                row[d] = np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
            else:
                row[d] = x[h, d]


@compiled
def _copy(source: Any, target: Any, slot: int) -> None:
    """``[heads, dim]`` to a token of the pool, as it is."""
    for h in range(source.shape[0]):
        target[h, slot] = source[h]


@compiled
def _copy_out(pool: Any, slot: int, target: Any) -> None:
    for h in range(target.shape[0]):
        target[h] = pool[h, slot]


@compiled
def _pack_layers(
    first: int, end: int, brain: bool, bits: int, group: int, sinks: int, pool_k: Any, pool_v: Any, slots: Any,
    codes_k: Any, codes_v: Any, k_scale: Any, k_zero: Any, v_scale: Any, v_zero: Any, sink_k: Any, sink_v: Any,
) -> None:  # fmt: skip
    tokens, heads, dim = slots.shape[0], pool_k.shape[1], pool_k.shape[3]
    top = np.float32(2**bits - 1)
    x = np.empty((heads, dim), np.float32)
    xb = x.view(np.uint32)
    low, high = np.empty((heads, dim), np.float32), np.empty((heads, dim), np.float32)
    code = np.empty((heads, dim), np.uint8)
    for layer in range(first, end):
        for t in range(sinks):
            _copy_out(pool_k[layer], slots[t], sink_k[layer, t])
            _copy_out(pool_v[layer], slots[t], sink_v[layer, t])
        for g in range(k_scale.shape[1]):
            begin, stop = g * group, min((g + 1) * group, tokens)
            # The first tokens are outliers and stored apart: they must not widen the scale of the rest.
            scan = max(begin, sinks) if max(begin, sinks) < stop else begin
            for h in range(heads):
                for d in range(dim):
                    low[h, d], high[h, d] = np.inf, -np.inf
            for t in range(scan, stop):
                _read(pool_k[layer], slots[t], x, xb, brain)
                for h in range(heads):
                    for d in range(dim):
                        low[h, d] = min(low[h, d], x[h, d])
                        high[h, d] = max(high[h, d], x[h, d])
            for h in range(heads):
                for d in range(dim):
                    scale = (high[h, d] - low[h, d]) / top
                    k_scale[layer, g, h, d], k_zero[layer, g, h, d] = scale, low[h, d]
                    high[h, d] = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
            for t in range(begin, stop):
                _read(pool_k[layer], slots[t], x, xb, brain)
                for h in range(heads):
                    for d in range(dim):
                        q = np.rint((x[h, d] - low[h, d]) * high[h, d])
                        code[h, d] = np.uint8(min(max(q, np.float32(0.0)), top))
                if bits == 8:
                    codes_k[layer, t] = code
                else:
                    for h in range(heads):
                        for i in range(dim // 2):
                            codes_k[layer, t, h, i] = code[h, 2 * i] | (code[h, 2 * i + 1] << 4)
        for t in range(tokens):
            _read(pool_v[layer], slots[t], x, xb, brain)
            for h in range(heads):
                lo, hi = x[h, 0], x[h, 0]
                for d in range(1, dim):
                    lo = min(lo, x[h, d])
                    hi = max(hi, x[h, d])
                scale = (hi - lo) / top
                v_scale[layer, t, h], v_zero[layer, t, h] = scale, lo
                inverse = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
                for d in range(dim):
                    q = np.rint((x[h, d] - lo) * inverse)
                    code[h, d] = np.uint8(min(max(q, np.float32(0.0)), top))
            if bits == 8:
                codes_v[layer, t] = code
            else:
                for h in range(heads):
                    for i in range(dim // 2):
                        codes_v[layer, t, h, i] = code[h, 2 * i] | (code[h, 2 * i + 1] << 4)


@compiled
def _rotate(x: Any, cos: Any, sin: Any) -> None:
    """Rotates keys ``[heads, dim]`` in place: channel i with channel i + len(cos), the rest stays."""
    half = cos.shape[0]
    for h in range(x.shape[0]):
        for i in range(half):
            a, b = x[h, i], x[h, i + half]
            x[h, i] = a * cos[i] - b * sin[i]
            x[h, i + half] = b * cos[i] + a * sin[i]


@compiled
def _unpack_layers(
    first: int, end: int, brain: bool, bits: int, group: int, sinks: int, pool_k: Any, pool_v: Any, slots: Any,
    codes_k: Any, codes_v: Any, k_scale: Any, k_zero: Any, v_scale: Any, v_zero: Any, sink_k: Any, sink_v: Any,
    cos: Any, sin: Any,
) -> None:  # fmt: skip
    tokens, heads, dim = slots.shape[0], pool_k.shape[1], pool_k.shape[3]
    x = np.empty((heads, dim), np.float32)
    xb = x.view(np.uint32)
    for layer in range(first, end):
        for t in range(tokens):
            g, slot = t // group, slots[t]
            if t < sinks:
                _copy(sink_k[layer, t], pool_k[layer], slot)
                _copy(sink_v[layer, t], pool_v[layer], slot)
                if cos.shape[0]:
                    _read(pool_k[layer], slot, x, xb, brain)
                    _rotate(x, cos, sin)
                    _write(x, xb, pool_k[layer], slot, brain)
                continue
            for h in range(heads):
                if bits == 8:
                    for d in range(dim):
                        x[h, d] = np.float32(codes_k[layer, t, h, d]) * k_scale[layer, g, h, d] + k_zero[layer, g, h, d]
                else:
                    for i in range(dim // 2):
                        c = codes_k[layer, t, h, i]
                        d = 2 * i
                        x[h, d] = np.float32(c & 15) * k_scale[layer, g, h, d] + k_zero[layer, g, h, d]
                        d += 1
                        x[h, d] = np.float32(c >> 4) * k_scale[layer, g, h, d] + k_zero[layer, g, h, d]
            _rotate(x, cos, sin)
            _write(x, xb, pool_k[layer], slot, brain)
            for h in range(heads):
                scale, zero = v_scale[layer, t, h], v_zero[layer, t, h]
                if bits == 8:
                    for d in range(dim):
                        x[h, d] = np.float32(codes_v[layer, t, h, d]) * scale + zero
                else:
                    for i in range(dim // 2):
                        c = codes_v[layer, t, h, i]
                        x[h, 2 * i] = np.float32(c & 15) * scale + zero
                        x[h, 2 * i + 1] = np.float32(c >> 4) * scale + zero
            _write(x, xb, pool_v[layer], slot, brain)


_NAMES = ("keys", "values", "key_scale", "key_zero", "value_scale", "value_zero", "sink_keys", "sink_values")


def _arguments(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, arrays: Arrays) -> tuple[Any, ...]:
    return (
        keys.dtype == torch.bfloat16, header.bits, header.key_group_tokens, header.sink_tokens,
        raw(keys), raw(values), slots.numpy(),
        *(arrays[name] for name in _NAMES),
    )  # fmt: skip


@compiled
def _pack_plain(first: int, end: int, pool_k: Any, pool_v: Any, slots: Any, out_k: Any, out_v: Any) -> None:
    for layer in range(first, end):
        for t in range(slots.shape[0]):
            _copy_out(pool_k[layer], slots[t], out_k[layer, t])
            _copy_out(pool_v[layer], slots[t], out_v[layer, t])


@compiled
def _unpack_plain(
    first: int, end: int, brain: bool, pool_k: Any, pool_v: Any, slots: Any, in_k: Any, in_v: Any, cos: Any, sin: Any
) -> None:
    x = np.empty((pool_k.shape[1], pool_k.shape[3]), np.float32)
    xb = x.view(np.uint32)
    for layer in range(first, end):
        for t in range(slots.shape[0]):
            _copy(in_k[layer, t], pool_k[layer], slots[t])
            if cos.shape[0]:
                _read(pool_k[layer], slots[t], x, xb, brain)
                _rotate(x, cos, sin)
                _write(x, xb, pool_k[layer], slots[t], brain)
            _copy(in_v[layer, t], pool_v[layer], slots[t])


_UNROTATED = (np.empty(0, np.float32), np.empty(0, np.float32))


def pack(keys: Tensor, values: Tensor, slots: Tensor, header: ChunkHeader, arrays: Arrays) -> None:
    """See ``dispatch.pack_chunk``."""
    if header.bits == 16:
        plain = raw(keys), raw(values), slots.numpy(), arrays["keys"], arrays["values"]
        over_parts(_pack_plain, range(header.layers), *plain)
        return
    over_parts(_pack_layers, range(header.layers), *_arguments(keys, values, slots, header, arrays))


def unpack(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    header: ChunkHeader,
    arrays: Arrays,
    rotation: tuple[Array, Array] | None,
    layers: range,
) -> None:
    """See ``dispatch.unpack_chunk``."""
    cos, sin = _UNROTATED if rotation is None else rotation
    if header.bits == 16:
        brain = keys.dtype == torch.bfloat16
        plain = raw(keys), raw(values), slots.numpy(), arrays["keys"], arrays["values"]
        over_parts(_unpack_plain, layers, brain, *plain, cos, sin)
        return
    over_parts(_unpack_layers, layers, *_arguments(keys, values, slots, header, arrays), cos, sin)
