"""A forward through fused layers on a device: PyTorch's matrix products, our row kernels and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kvkernels.cuda import layer_rows
from kvkernels.cuda.cuda_library import Kernels
from torch import Tensor

from inference_svc.model_runner.attention import attention_of
from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.model_runner.layer_pass import LayerPass
from inference_svc.models.fused_layer_weights import FusedLayerWeights, LayerWidths


class DeviceLayerPass(LayerPass):
    """Pass on a device, over the rows that are not padding. Nothing waits for the device."""

    def __init__(
        self,
        kernels: Kernels,
        rotary: Any,
        widths: LayerWidths,
        hidden: Tensor,
        batch: ForwardBatch,
        see: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(batch, see)
        real, self._kernels = batch.real, kernels
        self._hidden, self._slots = hidden[:real], batch.slots[:real]
        cosine, sine = rotary(self._hidden[None], batch.positions[None, :real])
        self._angles = cosine[0].contiguous(), sine[0].contiguous()
        self._normed = torch.empty_like(self._hidden)
        self._queries = hidden.new_empty(real, widths.heads, widths.dim)
        self._gated = hidden.new_empty(real, widths.inner)

    def norm(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        layer_rows.add_norm(self._kernels, self._hidden, delta, weight, epsilon, self._normed)
        self._show(self._normed)
        return self._normed

    def rotate(self, i: int, layer: FusedLayerWeights, qkv: Tensor) -> None:
        keys, values = self.batch.pool.keys[i], self.batch.pool.values[i]
        layer_rows.rope(
            self._kernels,
            qkv,
            self._angles,
            layer.head_norms,
            layer.epsilon,
            self._slots,
            self._queries,
            keys,
            values,
        )
        if self.batch.copies is not None:
            rows, slots = self.batch.copies.flat
            for part in (keys, values):
                part.index_copy_(1, slots, part.index_select(1, self._slots[rows]))
        self._show(self._queries)

    def attend(self, i: int, layer: FusedLayerWeights) -> Tensor:
        out: Tensor = attention_of(self.batch)(self._queries, self.batch, i, layer.scale, layer.window, None)
        self._show(out)
        return out.view(len(out), -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        layer_rows.silu_and_mul(self._kernels, gate_up, self._gated)
        self._show(self._gated)
        return self._gated

    def finish(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        rows = self.batch.logit_rows[: self.batch.wanted]
        hidden = self._hidden.index_select(0, rows)
        out = torch.empty_like(hidden)
        added = None if delta is None else delta.index_select(0, rows)
        layer_rows.add_norm(self._kernels, hidden, added, weight, epsilon, out)
        return out
