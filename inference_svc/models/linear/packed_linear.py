"""Linear layers with weights packed once for oneDNN.

Plain ``F.linear`` in bfloat16 reorders the weight at every call and reaches a third of the memory bandwidth at one row.
With packed weights oneDNN reaches two thirds of it. Our own kernel for few rows uses the same packed memory and reaches
nearly all of it. For every number of rows, the results have the same bits as those of plain ``F.linear``
(``tests/inference_svc/models/test_batch_invariance.py``).
"""

from __future__ import annotations

import torch
from kvkernels.cpu.bf16_gemv import MAX_ROWS, Bf16Gemv, find_bit_exact_gemv
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Drop-in for a bfloat16 ``nn.Linear`` on a CPU, ``[..., in] -> [..., out]``.

    Holds no plain weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        whole = weight.device.type != "meta"
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None) if whole else weight
        self._bias = None if bias is None else bias.detach()
        self._streamed: Bf16Gemv | None = None
        self._tried = False

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> PackedLinear:
        """Create a layer without a weight, for ``set_weight``."""
        return cls(torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta"), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, packed: Tensor) -> None:
        """Use another packed weight of the same shape from now on, without a copy."""
        self.packed = packed
        if self._streamed is not None:
            self._streamed = self._streamed.over(packed)

    def reset_kernel(self) -> None:
        """Reset the kernel choice: the next forward probes oneDNN's layout again, on its own thread."""
        self._tried, self._streamed = False, None

    def call(self, x: Tensor, y: Tensor) -> KernelCall | None:
        """Kernel call for a CPU graph: product of contiguous ``x [rows, in]`` into ``y [rows, out]``.

        None if oneDNN computes the product.
        """
        own = self._own() if x.shape[0] <= MAX_ROWS else None
        return None if own is None else own.call(x, y)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows > MAX_ROWS or not x.is_contiguous():
            return self.by_onednn(x)
        own = self._own()
        return self.by_onednn(x) if own is None else own(x.view(rows, -1)).view(*x.shape[:-1], self.out_features)

    def in_float32(self, x: Tensor) -> Tensor:
        """Compute ``x [rows, in] -> [rows, out]`` without rounding the result, in float32.

        Where oneDNN must compute the product, the result is rounded to bfloat16.
        """
        own = self._own()
        return self.by_onednn(x).float() if own is None else own(x.contiguous(), torch.float32)

    def _own(self) -> Bf16Gemv | None:
        """Our kernel for few rows; None if its bits differ from oneDNN's."""
        if not self._tried:
            # Only the computing thread may probe: oneDNN's layout may depend on the thread's number of threads.
            self._tried, self._streamed = True, find_bit_exact_gemv(self.packed, self._bias)
        return self._streamed

    def by_onednn(self, x: Tensor) -> Tensor:
        """Compute with oneDNN. The bits are those of our kernel if the number of rows is a multiple of ROW_MULTIPLE."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
