"""A forward through some fused layers: what the passes of a CPU and of a device have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from inference_svc.model_runner.forward_batch import ForwardBatch
from inference_svc.models.fused_layer_weights import FusedLayerWeights, LinearFn


class LayerPass(ABC):
    """A forward through some layers, with its buffers. ``hidden [rows, width]`` changes in place.

    Calls ``see`` with the output of each kernel.
    """

    def __init__(self, batch: ForwardBatch, see: Callable[[Tensor], None] | None) -> None:
        self.batch, self._see = batch, see

    def product(self, i: int, name: str, of: LinearFn, x: Tensor) -> Tensor:
        """Computes a product of layer ``i`` over ``x [rows, in]``. Adds the adapters' products of their rows."""
        out = of(x)
        for part in self.batch.adapted:
            part.add((i, name), x, out)
        self._show(out)
        return out

    @abstractmethod
    def norm(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Adds ``delta`` to ``hidden``; returns the norm of the sum, valid until the next norm."""

    @abstractmethod
    def rotate(self, i: int, layer: FusedLayerWeights, qkv: Tensor) -> None:
        """Rotates queries and keys. Writes keys and values of layer ``i`` to the pool, and keeps the queries."""

    @abstractmethod
    def attend(self, i: int, layer: FusedLayerWeights) -> Tensor:
        """Computes the attention of the queries in layer ``i``: ``[rows, heads * dim]``."""

    @abstractmethod
    def gate(self, gate_up: Tensor) -> Tensor:
        """Computes ``silu(gate) * up``, ``[rows, inner]``."""

    @abstractmethod
    def finish(self, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        """Adds ``delta`` to ``hidden``; returns the final norm of the rows that need logits."""

    def _show(self, output: Tensor) -> None:
        if self._see is not None:
            self._see(output)
