"""The rows of a batch that adapters change, and how they come to a model's own layers.

Rows of the model and of any adapters are one forward. The model's products are computed for all of them, as if there
were no adapters; what an adapter adds is computed for its rows alone, as many as matrix kernels give the same bits for
in any batch. So a row's result depends on nothing beside it.
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
    """The rows from ``first`` to ``end``; ``padding`` more make them as many as the kernels want. None where a batch
    has no other rows, and is padded itself."""

    adapter: LoraAdapter
    first: int
    end: int
    padding: int | None

    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        """Adds to these rows of ``out [rows, outputs]`` what the adapter makes of those of ``x [rows, inputs]``."""
        pair = self.adapter.pairs.get(place)
        if pair is None:
            return
        if self.padding is None:
            out += pair(x)
            return
        mine = F.pad(x[self.first : self.end], (0, 0, 0, self.padding))
        out[self.first : self.end] += pair(mine)[: self.end - self.first]


class LoraHooks:
    """Lets adapters add to the products of a model whose layers run as they are: each linear layer is a product by its
    path within the layer. ``rows`` are those of the batch that is being computed, of ``count`` rows in all."""

    def __init__(self, layers: Any) -> None:
        self._layers, self._hooked = layers, set[Place]()
        self.rows: tuple[LoraRows, ...] = ()
        self.count = 0

    def install(self, places: Iterable[Place]) -> None:
        """Makes these products call back. Idempotent."""
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
