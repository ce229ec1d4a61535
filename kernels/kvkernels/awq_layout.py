"""AWQ layout: AutoAWQ's packed 4-bit weights to codes and back, and the reference of their dequantization.

AutoAWQ's GEMM format: ``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[in / group, out / 8]``, ``scales``
``[in / group, out]``; nibble i of a word holds column ``[0, 2, 4, 6, 1, 3, 5, 7][i]``; ``W = (q - zero) * scale``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_columns(words: Tensor) -> Tensor:
    """Unpack AutoAWQ's int32 ``[rows, out / 8]`` to codes ``[rows, out]`` (uint8)."""
    shifts = torch.tensor([4 * _COLUMN_OF_NIBBLE.index(c) for c in range(8)], device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def pack_columns(codes: Tensor) -> Tensor:
    """Pack codes ``[rows, out]`` (0 to 15) to AutoAWQ's int32 ``[rows, out / 8]``: inverse of ``unpack_columns``."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).to(torch.int32)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(_COLUMN_OF_NIBBLE):
        words |= parts[..., column] << 4 * nibble
    return words


def reference_weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Dequantize AutoAWQ's tensors to ``[out, in]`` in the scales' dtype, in plain torch."""
    group = qweight.shape[0] // scales.shape[0]
    zeros = unpack_columns(qzeros).repeat_interleave(group, 0).to(scales.dtype)
    return ((unpack_columns(qweight).to(scales.dtype) - zeros) * scales.repeat_interleave(group, 0)).t().contiguous()
