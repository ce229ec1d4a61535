"""LoRA in a batch: rows with adapters, and hooks on a model's own layers.

A batch may contain rows without an adapter and rows of several adapters. The model's products are computed for all
rows, as if there were no adapters. Then each adapter's products are computed for the rows of that adapter only. These
rows are padded to a number for which the matrix kernels give a row the same bits in any batch, so a row's result does
not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from inference_svc.lora.lora_adapter import LoraAdapter, Place


@dataclass(frozen=True)
class LoraRows:
    """Contiguous rows ``first`` to ``end`` of a batch that use one adapter.

    ``padding`` is the number of zero rows that pad these rows to ROW_MULTIPLE. It is None if all rows of the batch use
    the adapter, because the batch itself is padded then.
    """

    adapter: LoraAdapter
    first: int
    end: int
    padding: int | None

    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        """Adds the adapter's product of these rows of ``x [rows, inputs]`` to ``out [rows, outputs]``."""
        pair = self.adapter.pairs.get(place)
        if pair is None:
            return
        if self.padding is None:
            out += pair(x)
            return
        mine = F.pad(x[self.first : self.end], (0, 0, 0, self.padding))
        out[self.first : self.end] += pair(mine)[: self.end - self.first]


class LoraHooks:
    """Forward hooks that add adapters' products to a model's own linear layers.

    Used for models without fused layers. A linear layer is named by its path within its decoder layer. The decoder sets
    ``rows`` (the rows with adapters) and ``count`` (all rows) before each forward.
    """

    def __init__(self, layers: Any) -> None:
        self._layers, self._hooked = layers, set[Place]()
        self.rows: tuple[LoraRows, ...] = ()
        self.count = 0

    def install(self, places: Iterable[Place]) -> None:
        """Installs hooks on these linear layers. Idempotent."""
        for place in set(places) - self._hooked:
            layer, path = place
            self._layers[layer].get_submodule(path).register_forward_hook(partial(self._after, place))
            self._hooked.add(place)

    def _after(self, place: Place, module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if not self.rows:
            return
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        if len(x) != self.count:
            raise RuntimeError(f"layer {place[0]} gives {place[1]} other rows than the batch has")
        flat = out.view(self.count, -1)
        for part in self.rows:
            part.add(place, x, flat)
