"""A placed adapter: two low-rank products for each linear layer that it changes.

The layer's own weight stays as it is, at any width and in any place, so that rows of the model and of any adapters are
computed together (as in Punica, Chen et al., 2023, and S-LoRA, Sheng et al., 2023): the model's product for all rows,
then an adapter's for its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.lora.adapter_weights import AdapterWeights
from inference_svc.models.linear.dense_linear import DenseLinear, linear_for
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear

# Ranks are padded with zeros to whole vectors of the matrix kernels.
_RANK_MULTIPLE = 16
_PLACE = re.compile(r"model\.layers\.(\d+)\.(.+)")

Place = tuple[int, str]
"""Layer number, and name of one of its linear products."""


class LoraPair:
    """Maps ``x [rows, inputs]`` to the addition to a product, ``[rows, outputs]``, in x's dtype."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self._down, self._up = linear_for(down, None), linear_for(up, None)
        self.size_bytes = down.nbytes + up.nbytes

    @property
    def products(self) -> tuple[PackedLinear | DenseLinear | PlainLinear, ...]:
        return self._down, self._up

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._up(self._down(x))
        return out


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter that any number of sequences may use. ``fingerprint`` is part of its namespace."""

    name: str
    fingerprint: bytes
    pairs: Mapping[Place, LoraPair]

    @property
    def size_bytes(self) -> int:
        return sum(pair.size_bytes for pair in self.pairs.values())


def place_adapter(
    weights: AdapterWeights, together: Mapping[str, Sequence[str]], dtype: torch.dtype, device: torch.device
) -> LoraAdapter:
    """Place an adapter beside a model.

    ``together`` maps names of fused products to the paths (within a layer) of the linears that they join; other linears
    are products of their own, named by their paths.
    """
    named = {path: name for name, paths in together.items() for path in paths}
    wanted: set[Place] = set()
    for path in weights.layers:
        match = _PLACE.fullmatch(path)
        assert match is not None, "weights are of linear layers in layers"
        wanted.add((int(match[1]), named.get(match[2], match[2])))
    pairs = {}
    for layer, product in sorted(wanted):
        parts = [f"model.layers.{layer}.{part}" for part in together.get(product, (product,))]
        down, up = _joined(weights, parts)
        pairs[layer, product] = LoraPair(down.to(device, dtype), up.to(device, dtype))
    return LoraAdapter(weights.name, weights.fingerprint, pairs)


def _joined(weights: AdapterWeights, parts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Join the matrices of linears over the same input whose outputs are concatenated.

    Returns ``down [ranks, inputs]`` and ``up [outputs, ranks]``, float32 and scaled, block-diagonal in ``up``; linears
    that the adapter does not change have zeros.
    """
    outputs, inputs = sum(weights.linears[part][0] for part in parts), weights.linears[parts[0]][1]
    found = [weights.layers.get(part) for part in parts]
    ranks = sum(one.down.shape[0] for one in found if one is not None)
    ranks += -ranks % _RANK_MULTIPLE
    down, up = torch.zeros(ranks, inputs), torch.zeros(outputs, ranks)
    row = rank = 0
    for part, one in zip(parts, found, strict=True):
        if one is not None:
            count = one.down.shape[0]
            down[rank : rank + count] = one.down.float()
            up[row : row + one.up.shape[0], rank : rank + count] = one.up.float() * one.scale
            rank += count
        row += weights.linears[part][0]
    return down, up
