"""Products of a device with dequantized weights: their bits, and the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kvkernels.cpu import quantized_gemm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.models.linear.dequantized_linear import DequantizedLinear

OUTPUTS, INPUTS = 16384, 1024


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.size_bytes = max(self.size_bytes, out.untyped_storage().nbytes())
        return out


def dequantized_at_once(weight: quantized_gemm.QuantizedWeight) -> Tensor:
    codes, scales, zeros = quantized_gemm.unpack(weight)
    scales, zeros = (x.float().repeat_interleave(weight.group, 1) for x in (scales, zeros))
    return (codes.float() - zeros) * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", quantized_gemm.BITS)
def test_a_product_takes_no_more_than_its_weight_in_the_dtype_of_its_input(dtype: torch.dtype, bits: int) -> None:
    """The largest product of a model is its head, and no budget reserves float32 weights for it."""
    torch.manual_seed(1)
    weight = quantized_gemm.quantize(torch.randn(OUTPUTS, INPUTS), bits, 64)
    x, bias = torch.randn(3, INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
    want = F.linear(x, dequantized_at_once(weight).to(dtype), bias)
    with LargestTensor() as largest:
        found = DequantizedLinear(weight, bias)(x)
    assert torch.equal(found, want)
    assert largest.size_bytes <= OUTPUTS * INPUTS * dtype.itemsize
