"""Linear layers with weights packed once for oneDNN.

Plain ``F.linear`` in bfloat16 reorders the weight at every call and reaches a third of the memory bandwidth at
one row. Packed, it reaches two thirds of it, and few rows are computed by a kernel of our own over the same memory,
which reaches nearly all of it. The results are bit-equal to the plain ones for every number of rows
(``tests/inference_svc/test_batch_invariance.py``).
"""

from __future__ import annotations

import torch
from kvkernels.cpu.products import MOST_ROWS, ROWS, StreamedProduct, streamed
from torch import Tensor, nn

from inference_svc.model.plain_linear import PlainLinear


class PackedLinear(nn.Module):
    """Drop-in for a bfloat16 ``nn.Linear`` on a CPU: ``[..., in] -> [..., out]``. Holds no plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        whole = weight.device.type != "meta"
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None) if whole else weight
        self._bias = None if bias is None else bias.detach()
        self._streamed: StreamedProduct | None = None
        self._tried = False

    @classmethod
    def shell(cls, outputs: int, inputs: int, bias: Tensor | None) -> PackedLinear:
        """One without a weight, until it is pointed at one."""
        return cls(torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta"), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def point(self, packed: Tensor) -> None:
        """Computes with another packed weight of the same shape from now on, which is not copied."""
        self.packed = packed
        if self._streamed is not None:
            self._streamed = self._streamed.over(packed)

    def reconsider(self) -> None:
        """Forgets what was found out about oneDNN's order: the next forward finds it out for its own thread."""
        self._tried, self._streamed = False, None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows > MOST_ROWS or rows % ROWS or not x.is_contiguous():
            return self.by_onednn(x)
        if not self._tried:
            # Not before: oneDNN's order may depend on the number of threads, which is this thread's.
            self._tried, self._streamed = True, streamed(self.packed, self._bias)
        if self._streamed is None:
            return self.by_onednn(x)
        return self._streamed(x.view(rows, -1)).view(*x.shape[:-1], self.out_features)

    def by_onednn(self, x: Tensor) -> Tensor:
        """The same, with the same bits, by oneDNN whatever the number of rows."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


def dense(weight: Tensor, bias: Tensor | None) -> PackedLinear | PlainLinear:
    """A layer over a weight ``[out, in]`` that is not quantized: packed, which copies it, where that is faster."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_linears(model: nn.Module) -> int:
    """Replaces the bfloat16 linear layers of a model where oneDNN has native bfloat16. Returns how many."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    packed = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child.weight, child.bias))
                packed += 1
    return packed
