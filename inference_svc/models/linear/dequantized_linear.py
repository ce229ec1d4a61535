"""Linear layers on a device with 4-bit or 8-bit weights, which are widened for each product.

For weights that a device streams. Weights cross the link packed; widening them in device memory takes less time than
that copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kvkernels.cpu import quantized_gemm
from torch import Tensor, nn


class DequantizedLinear(nn.Module):
    """Drop-in for ``nn.Linear`` on a device, ``[..., in] -> [..., out]``, over codes of ``quantized_gemm``."""

    def __init__(self, weight: quantized_gemm.QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.quantized, self._bias = weight, None if bias is None else bias.detach()

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> DequantizedLinear:
        """Create a layer without a weight, for ``set_weight``."""
        nothing = torch.empty(outputs // quantized_gemm.OUTPUTS, 0, dtype=torch.uint8)
        return cls(quantized_gemm.QuantizedWeight(nothing, inputs, 0, 0), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, weight: quantized_gemm.QuantizedWeight) -> None:
        """Use another weight of the same shape from now on, without a copy."""
        self.quantized = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantized_gemm.dequantize(self.quantized).to(x.dtype), self._bias)
