"""Linear layers that compute in float32 on a CPU, with weights in their stored width.

CPUs without native bfloat16 run 16-bit models in float32. Memory bandwidth limits decoding, and torch would read four
bytes per weight at a fraction of the bandwidth. ``kvkernels.cpu.f32_gemm`` reads two bytes per weight, or for a
quantized file one byte or half a byte, at nearly the full bandwidth. The results are the same, and a row's bits do not
depend on its batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kvkernels.cpu import f32_gemm
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor, nn

from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear


def serves(weight: Tensor) -> bool:
    """True if a layer with this weight can be a DenseLinear."""
    return weight.device.type == "cpu" and f32_gemm.serves(weight.dtype)


def becomes_dense(module: nn.Module) -> bool:
    """True if ``pack_linears`` replaces this layer by a DenseLinear.

    The layer's own product then never runs.
    """
    return type(module) is nn.Linear and serves(module.weight)


class DenseLinear(nn.Module):
    """Drop-in for a float32 ``nn.Linear`` on a CPU, ``[..., in] -> [..., out]``.

    Holds no plain weight.
    """

    def __init__(self, weight: f32_gemm.DenseWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.dense, self._bias = weight, None if bias is None else bias.detach()

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> DenseLinear:
        """Create a layer without a weight, for ``set_weight``."""
        return cls(f32_gemm.DenseWeight(torch.empty(0), inputs, outputs, "float32"), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, weight: f32_gemm.DenseWeight) -> None:
        """Use another weight of the same shape from now on, without a copy."""
        self.dense = weight

    def call(self, x: Tensor, y: Tensor) -> KernelCall:
        """Kernel call for a CPU graph: product of contiguous ``x [rows, in]`` into ``y [rows, out]``."""
        return f32_gemm.gemm_call(x, self.dense, self._bias, y)

    def forward(self, x: Tensor) -> Tensor:
        out = f32_gemm.gemm(x.reshape(-1, self.in_features), self.dense, self._bias)
        return out.view(*x.shape[:-1], self.out_features)


class NarrowEmbedding(nn.Module):
    """Drop-in for a float32 ``nn.Embedding`` that keeps its values in their stored width."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            weight.detach().to(getattr(torch, f32_gemm.narrowest_storage(weight))), requires_grad=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).float()


def linear_for(weight: Tensor, bias: Tensor | None) -> PackedLinear | DenseLinear | PlainLinear:
    """Build the fastest layer over an unquantized weight ``[out, in]``. A packed layer copies the weight."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return DenseLinear(f32_gemm.pack(weight), bias) if serves(weight) else PlainLinear(weight, bias)


def pack_linears(model: nn.Module) -> None:
    """Replace a model's plain linear layers by those of ``linear_for``.

    On a CPU, also replaces float32 embeddings by NarrowEmbedding. Quantized layers stay.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, linear_for(child.weight.detach(), child.bias))
            elif type(child) is nn.Embedding and serves(child.weight):
                setattr(module, name, NarrowEmbedding(child.weight))
