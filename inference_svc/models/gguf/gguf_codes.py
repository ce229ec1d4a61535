"""Codes, scales and zeros of quantized GGUF tensors, for products with the file's own codes.

Block layouts: https://github.com/ggml-org/ggml (ggml-common.h, ggml-quants.c). Every type here gives a group of 16 or
32 inputs a scale and a base: a value is ``code * scale + base``. The kernel computes ``(code - zero) * scale``. Codes
are exact; scales and zeros are rounded to float16. The rounding moves a value by at most 2 ** -10 of the larger of
``code * scale`` and ``base``; bfloat16 would move it by up to 2 ** -9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from kvkernels.cpu import quantized_gemm
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Codes = NDArray[np.integer[Any]]
Floats = NDArray[np.float32]
# METHOD is the quantization method in config.json of a folder that keeps a file's codes. BITS_OF_PART maps the name of
# a tensor with codes to the bits per code.
METHOD = "gguf"
BITS_OF_PART = {f"codes{bits}": bits for bits in quantized_gemm.BITS}
_LARGEST_ZERO = 60_000.0  # float16 ends at 65,504


@dataclass(frozen=True)
class BlockParts:
    """Parts of blocks: ``codes [blocks, values]``, ``scales`` and ``bases [blocks, groups]``.

    A value is ``code * scale + base``.
    """

    codes: Codes
    scales: Floats
    bases: Floats


@dataclass(frozen=True)
class CodedType:
    """Bits of a GGUF type's codes, inputs of a group, and the function that unpacks its blocks."""

    bits: int
    group: int
    unpack: Callable[[Bytes], BlockParts]


def pack_rows(rows: Bytes, kind: GGMLQuantizationType) -> quantized_gemm.QuantizedWeight:
    """Pack ``rows [outputs, bytes of a row]`` of a type in ``CODED`` for the kernel.

    Raises ValueError for outputs that the kernel does not support.
    """
    coded, (values, size) = CODED[kind], GGML_QUANT_SIZES[kind]
    inputs = rows.shape[1] // size * values
    parts = coded.unpack(np.ascontiguousarray(rows).reshape(-1, size))
    scales, bases = parts.scales, parts.bases
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half_scales = scales.astype(np.float16).astype(np.float32)
        zeros = -bases / half_scales
    # A group whose scale is negligible beside its base is constant.
    constant = ~(np.abs(zeros) <= _LARGEST_ZERO)
    half_scales, zeros = np.where(constant, -bases, half_scales), np.where(constant, 1.0, zeros)
    codes = np.where(np.repeat(constant, coded.group, axis=1), 0, parts.codes).astype(np.uint8)
    groups = inputs // coded.group
    scales_, zeros_ = (torch.from_numpy(x.astype(np.float32)).view(-1, groups) for x in (half_scales, zeros))
    return quantized_gemm.pack(torch.from_numpy(codes).view(-1, inputs), scales_, zeros_, coded.bits)


def stored_weight(data: torch.Tensor, bits: int) -> quantized_gemm.QuantizedWeight:
    """Weight over the tensor that ``stored_shape`` describes, without a copy."""
    strips, groups, size = data.shape
    group = quantized_gemm.group_of(size, bits)
    return quantized_gemm.QuantizedWeight(data.view(strips, -1), groups * group, group, bits)


def stored_shape(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Shape of a weight's codes in a folder: strips of outputs, groups of inputs, bytes of a group."""
    coded, (outputs, inputs) = CODED[kind], shape
    strips, groups = outputs // quantized_gemm.OUTPUTS, inputs // coded.group
    return strips, groups, quantized_gemm.size_bytes(inputs, outputs, coded.bits, coded.group) // (strips * groups)


def is_coded(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> bool:
    """True if the kernel multiplies a weight ``[outputs, inputs]`` of this type with the file's own codes."""
    return len(shape) == 2 and kind in CODED and quantized_gemm.serves(shape[1], shape[0], CODED[kind].group)


# ---- blocks of 32 values --------------------------------------------------------------------------------------------


def _halves(blocks: Bytes, at: int) -> Floats:
    """Float16 at byte ``at`` of every block, ``[blocks, 1]``."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Codes:
    """Lower halves of the bytes ``[..., n]``, then the upper ones: ``[..., 2 n]``."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(packed: Bytes) -> Codes:
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << 4


def _q4_0(blocks: Bytes) -> BlockParts:
    scale = _halves(blocks, 0)
    return BlockParts(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Bytes) -> BlockParts:
    scale = _halves(blocks, 0)
    return BlockParts(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale)


def _q5_1(blocks: Bytes) -> BlockParts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockParts(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Bytes) -> BlockParts:
    scale = _halves(blocks, 0)
    return BlockParts(blocks[:, 2:] ^ 128, scale, -128 * scale)


# ---- blocks of 256 values (K-quants) --------------------------------------------------------------------------------


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack 8 scales and 8 minima of 6 bits from 12 bytes: ``[blocks, 8]`` each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    mins = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _q4_k(blocks: Bytes) -> BlockParts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(len(blocks), -1)
    return BlockParts(codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * mins)


def _q5_k(blocks: Bytes) -> BlockParts:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = (low | high << 4).reshape(len(blocks), -1)
    return BlockParts(codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * mins)


def _q6_k(blocks: Bytes) -> BlockParts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return BlockParts((low | high << 4).reshape(len(blocks), -1), scales, -32 * scales)


def _two_bits(packed: Bytes) -> Codes:
    """Unpack 256 codes of 2 bits from 64 bytes: four values per byte, 32 inputs apart."""
    return packed.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3


def _q2_k(blocks: Bytes) -> BlockParts:
    both = blocks[:, :16]
    scales, bases = _halves(blocks, 80) * (both & 15), -_halves(blocks, 82) * (both >> 4)
    return BlockParts(_two_bits(blocks[:, 16:80]).reshape(len(blocks), -1), scales, bases)


def _q3_k(blocks: Bytes) -> BlockParts:
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = _halves(blocks, 108) * ((low | high.reshape(-1, 16) << 4).astype(np.float32) - 32)
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32) | third << 2
    return BlockParts(codes.reshape(len(blocks), -1), scales, -4 * scales)


CODED = {
    GGMLQuantizationType.Q4_0: CodedType(4, 32, _q4_0),
    GGMLQuantizationType.Q4_1: CodedType(4, 32, _q4_1),
    GGMLQuantizationType.Q5_0: CodedType(8, 32, _q5_0),
    GGMLQuantizationType.Q5_1: CodedType(8, 32, _q5_1),
    GGMLQuantizationType.Q8_0: CodedType(8, 32, _q8_0),
    GGMLQuantizationType.Q2_K: CodedType(4, 16, _q2_k),
    GGMLQuantizationType.Q3_K: CodedType(4, 16, _q3_k),
    GGMLQuantizationType.Q4_K: CodedType(4, 32, _q4_k),
    GGMLQuantizationType.Q5_K: CodedType(8, 32, _q5_k),
    GGMLQuantizationType.Q6_K: CodedType(8, 16, _q6_k),
}
