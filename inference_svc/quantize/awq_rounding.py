"""Rounds weights to 4 bits in AutoAWQ's GEMM format.

For each output, a group of inputs shares a scale (float16) and a zero (4 bits): ``W = (code - zero) * scale``. Codes
and zeros are 0 to 15. Scales are rounded to float16 before codes are chosen, so that codes fit the written scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvkernels.awq_layout import pack_columns
from torch import Tensor

# Group sizes: inputs that share a scale and a zero. A model uses the first size that divides every layer's inputs.
GROUPS = (128, 64, 32)
_MAX_CODE = 15
# The narrowest range of a group that AutoAWQ writes; it keeps scales above zero.
_MIN_RANGE = 1e-5


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight: ``codes [out, in]`` (uint8), ``scales`` (float16) and ``zeros`` (uint8) ``[out, groups]``."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def dense(self) -> Tensor:
        """Dequantize to float32 ``[out, in]``."""
        groups = self.codes.float().view(*self.zeros.shape, -1)
        return (groups - self.zeros.float()[..., None]).mul_(self.scales.float()[..., None]).flatten(1)

    def parts(self) -> dict[str, Tensor]:
        """Return ``qweight``, ``qzeros`` and ``scales`` of AutoAWQ's GEMM format.

        See ``kvkernels.cuda.awq_gemm``.
        """
        return {
            "qweight": pack_columns(self.codes.t()),
            "qzeros": pack_columns(self.zeros.t()),
            "scales": self.scales.t().contiguous(),
        }


def quantize_weight(weight: Tensor, group: int, shrink: Tensor | None = None) -> QuantizedWeight:
    """Round a weight ``[out, in]`` to the nearest codes of its groups' ranges.

    ``shrink [out, groups]`` scales the ranges; values outside the scaled ranges are clipped. Raises ValueError for
    values that float16 scales cannot hold.
    """
    groups = weight.view(len(weight), -1, group)
    scales, zeros = _scales(groups, shrink)
    if not bool(scales.isfinite().all()):
        raise ValueError("it has numbers that are not finite, or too large for scales in float16")
    codes = _codes(groups, scales, zeros).flatten(1).to(torch.uint8)
    return QuantizedWeight(codes, scales.half().squeeze(-1), zeros.to(torch.uint8).squeeze(-1))


def fake_quantize(weight: Tensor, group: int, shrink: Tensor | None = None) -> Tensor:
    """Compute ``quantize_weight(...).dense()`` in one pass, for searches."""
    groups = weight.view(len(weight), -1, group)
    scales, zeros = _scales(groups, shrink)
    return _codes(groups, scales, zeros).sub_(zeros).mul_(scales).flatten(1)


def _scales(groups: Tensor, shrink: Tensor | None) -> tuple[Tensor, Tensor]:
    # Every range contains zero: weights near zero stay there, and a 4-bit zero point always exists.
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    if shrink is not None:
        low, high = low * shrink[..., None], high * shrink[..., None]
    scales = ((high - low).clamp_(min=_MIN_RANGE) / _MAX_CODE).half().float()
    return scales, (-low / scales).round_().clamp_(0, _MAX_CODE)


def _codes(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (groups / scales).round_().add_(zeros).clamp_(0, _MAX_CODE)
