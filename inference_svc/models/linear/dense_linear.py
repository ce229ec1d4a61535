"""Linear layers that compute in float32 on a CPU, with weights as narrow as they came.

CPUs without native bfloat16 run 16-bit models in float32. What decoding takes is bytes, and torch would read four for
each weight, at a fraction of what memory gives: ``kvkernels.cpu.f32_gemm`` reads two, or the one or half a one that a
quantized file has, at nearly all of it. The numbers are the same ones, and no bit of a row depends on its batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kvkernels.cpu import f32_gemm
from kvkernels.cpu.cpu_library import Call
from torch import Tensor, nn

from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear


def serves(weight: Tensor) -> bool:
    """Whether a layer with this weight can be one."""
    return weight.device.type == "cpu" and f32_gemm.serves(weight.dtype)


def becomes_dense(module: nn.Module) -> bool:
    """Whether ``fit_linears`` makes a DenseLinear of this layer, whose own product never runs then."""
    return type(module) is nn.Linear and serves(module.weight)


class DenseLinear(nn.Module):
    """Drop-in for a float32 ``nn.Linear`` on a CPU: ``[..., in] -> [..., out]``. Holds no plain weight."""

    def __init__(self, weight: f32_gemm.Dense, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.dense, self._bias = weight, None if bias is None else bias.detach()

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> DenseLinear:
        """One without a weight, until it is pointed at one."""
        return cls(f32_gemm.Dense(torch.empty(0), inputs, outputs, "float32"), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, weight: f32_gemm.Dense) -> None:
        """Computes with another weight of the same shape from now on, which is not copied."""
        self.dense = weight

    def call(self, x: Tensor, y: Tensor) -> Call:
        """The product of contiguous ``x [rows, in]`` into ``y [rows, out]``, for a chain."""
        return f32_gemm.call(x, self.dense, self._bias, y)

    def forward(self, x: Tensor) -> Tensor:
        out = f32_gemm.product(x.reshape(-1, self.in_features), self.dense, self._bias)
        return out.view(*x.shape[:-1], self.out_features)


class NarrowEmbedding(nn.Module):
    """Drop-in for a float32 ``nn.Embedding`` that keeps the numbers as narrow as they came."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(getattr(torch, f32_gemm.narrowest(weight))), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).float()


def linear_for(weight: Tensor, bias: Tensor | None) -> PackedLinear | DenseLinear | PlainLinear:
    """A layer over a weight ``[out, in]`` that is not quantized: packed, which copies it, where that is faster."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return DenseLinear(f32_gemm.pack(weight), bias) if serves(weight) else PlainLinear(weight, bias)


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers of a model by those of ``product_of``, and its float32 embeddings on a CPU where the
    kernel runs. What is quantized stays."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, linear_for(child.weight.detach(), child.bias))
            elif type(child) is nn.Embedding and serves(child.weight):
                setattr(module, name, NarrowEmbedding(child.weight))
