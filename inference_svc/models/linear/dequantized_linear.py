"""Linear layers on a device with 4-bit or 8-bit weights, which are widened for each product.

Used for weights that are streamed to a device. The weights are copied to the device packed. Widening them in device
memory takes less time than the copy.
"""

from __future__ import annotations

import torch.nn.functional as F
from kvkernels.cpu import quantized_gemm
from torch import Tensor

from inference_svc.models.linear.quantized_linear import CodedLinear


class DequantizedLinear(CodedLinear):
    """Drop-in for ``nn.Linear`` on a device, ``[..., in] -> [..., out]``, over codes of ``quantized_gemm``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, quantized_gemm.dequantize(self.quantized, x.dtype), self._bias)
