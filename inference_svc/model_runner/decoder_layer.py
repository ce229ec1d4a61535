"""A decoder layer of Llama's structure, as our CPU kernels want it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LinearFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerWidths:
    """Heads of queries, of keys and values, channels of a head, and of the feed-forward part."""

    heads: int
    kv_heads: int
    dim: int
    inner: int


@dataclass
class FusedLayerWeights:
    """The weights of one layer, as the kernels want them."""

    qkv: LinearFn
    o: LinearFn
    gate_up: LinearFn
    down: LinearFn
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor | None, Tensor | None]
    epsilon: float
    scale: float
    window: int | None
