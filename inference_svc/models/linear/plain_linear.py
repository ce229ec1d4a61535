"""Linear layers over plain weights that can be exchanged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Matrix kernels give a row the same bits in every batch whose number of rows is a multiple of this.
ROW_MULTIPLE = 4
# Outputs whose weights ``in_float32`` widens at a time on a CPU: they stay in its caches.
_SLICE = 1024


class PlainLinear(nn.Module):
    """``[..., in] -> [..., out]`` over a weight ``[out, in]`` that may be exchanged."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> PlainLinear:
        """Create a layer without a weight, for ``set_weight``."""
        return cls(torch.empty(outputs, inputs, device="meta"), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, weight: Tensor) -> None:
        """Use another weight ``[out, in]`` from now on, without a copy."""
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


def in_float32(linear: Any, x: Tensor) -> Tensor:
    """Compute ``x [rows, in] -> [rows, out]`` in float32, if possible without rounding to the layer's dtype.

    ``linear`` is a layer of any kind. Used for logits: rounded to bfloat16, the largest are often equal (ADR 104).
    """
    if hasattr(linear, "in_float32"):
        return linear.in_float32(x)  # type: ignore[no-any-return]
    if x.dtype == torch.float32 or not isinstance(linear, (nn.Linear, PlainLinear)):
        return linear(x).float()  # type: ignore[no-any-return]
    if x.device.type == "cpu":
        wide = x.float()
        y = torch.cat([F.linear(wide, part.float()) for part in torch.split(linear.weight, _SLICE)], -1)
    else:
        y = torch.mm(x, linear.weight.t(), out_dtype=torch.float32)
    return y if linear.bias is None else y + linear.bias


def plain_linears(model: nn.Module) -> None:
    """Replace a model's linear layers by layers whose weights can be exchanged. Quantized layers stay."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PlainLinear(child.weight.detach(), child.bias))
