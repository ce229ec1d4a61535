"""LoRA adapter in memory: two low-rank products per changed linear layer.

The layer's own weight is not modified; the weight may be quantized, or streamed from a file. So one batch may contain
rows of the model and of several adapters (as in Punica, Chen et al., 2023, and S-LoRA, Sheng et al., 2023). The layer's
product is computed for all rows, then each adapter's products are computed for the rows of that adapter.
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
    """Computes ``up(down(x))``: ``[rows, inputs]`` to ``[rows, outputs]``, in x's dtype.

    The caller adds the result to the layer's own product.
    """

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
    """Adapter that any number of sequences may use. ``fingerprint`` is part of its namespace's hash."""

    name: str
    fingerprint: bytes
    pairs: Mapping[Place, LoraPair]

    @property
    def size_bytes(self) -> int:
        return sum(pair.size_bytes for pair in self.pairs.values())


def place_adapter(
    weights: AdapterWeights, together: Mapping[str, Sequence[str]], dtype: torch.dtype, device: torch.device
) -> LoraAdapter:
    """Build an adapter's products in the model's dtype, on its device.

    ``together`` maps the name of each fused product to the paths (within a layer) of its linears. Every other linear is
    a product of its own, named by its path.
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
    """Join the matrices of linears that have the same input and concatenated outputs.

    Returns ``down [ranks, inputs]`` and ``up [outputs, ranks]`` in float32. ``up`` is scaled and block-diagonal. A
    linear that the adapter does not change has zeros.
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
