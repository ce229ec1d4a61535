"""Shard plan: the heads, feed-forward channels and vocabulary rows of one rank.

The division is Megatron's (Shoeybi et al., arXiv:1909.08053). Query, key, value, gate and up projections are divided by
output. The output and down projections are divided by input. Embedding and head are divided by vocabulary row. Parts
need not be equal, so that models such as SmolLM2 (9 query heads, 3 key heads) can be divided by two. Each key head
stays with its query heads. With fewer key heads than ranks, several ranks hold the same key head, with different query
heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvsidecar.errors import ConfigurationError, ModelUnsupported

from inference_svc.models.mixture_of_experts import num_experts

Part = tuple[int, int]
# Feed-forward channels per unit of division. The first unit that divides the channels is used: a large unit avoids cuts
# in groups of quantized weights.
_CHANNEL_UNITS = (64, 32, 16, 8, 1)
_VOCABULARY_UNIT = 64
_QKV = re.compile(r"\.self_attn\.([qkv])_proj\.(weight|bias)$")
_HEAD_NORM = re.compile(r"\.self_attn\.[qk]_norm\.weight$")


@dataclass(frozen=True)
class ShardPlan:
    """Parts of one rank, as ``(first, end)`` ranges in the whole model."""

    rank: int
    size: int
    heads: Part
    kv_heads: Part
    channels: Part  # feed-forward channels
    vocabulary: tuple[Part, ...]  # rows of every rank, so that rank 0 can order the logits
    head_dim: int
    all_heads: int
    all_kv_heads: int
    all_channels: int

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def num_channels(self) -> int:
        return self.channels[1] - self.channels[0]

    @property
    def replicates_kv_heads(self) -> bool:
        """True if other ranks hold this rank's key heads, too."""
        return self.all_kv_heads < self.size

    def slices_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, list[Part]] | None:
        """Returns the dimension and the ranges of a parameter that this rank holds; None for the whole parameter.

        Raises ModelUnsupported for a parameter of a layer that the plan does not know.
        """
        query, key = self._rows(self.heads), self._rows(self.kv_heads)
        if found := _QKV.search(name):
            return 0, [query if found[1] == "q" else key]
        if self.is_full_width_norm(name, shape):
            if self.replicates_kv_heads:
                raise ModelUnsupported(
                    f"tensor_parallel_size is {self.size}, and {name} spans all {self.all_kv_heads} key heads; allowed "
                    f"are 1 to {self.all_kv_heads}"
                )
            return 0, [query if ".q_norm." in name else key]
        if name.endswith(".self_attn.qkv_proj.weight"):
            first_key, first_value = (
                self.all_heads * self.head_dim,
                (self.all_heads + self.all_kv_heads) * self.head_dim,
            )
            return 0, [query, _moved(key, first_key), _moved(key, first_value)]
        if name.endswith(".mlp.gate_up_proj.weight"):
            return 0, [self.channels, _moved(self.channels, self.all_channels)]
        if name.endswith((".mlp.gate_proj.weight", ".mlp.up_proj.weight", ".mlp.gate_proj.bias", ".mlp.up_proj.bias")):
            return 0, [self.channels]
        if name.endswith(".self_attn.o_proj.weight"):
            return 1, [query]
        if name.endswith(".mlp.down_proj.weight"):
            return 1, [self.channels]
        if name.endswith("embed_tokens.weight") or name.startswith("lm_head."):
            return 0, [self.vocabulary[self.rank]]
        # Every rank has whole norms, and whole biases of row-parallel layers; the bias is added once, after the sum.
        if len(shape) == 1 and ("norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))):
            return None
        raise ModelUnsupported(f"tensor_parallel_size is {self.size}, and {name} cannot be divided; use 1")

    def is_full_width_norm(self, name: str, shape: tuple[int, ...]) -> bool:
        """True for the weight of a norm over all query or key heads together, as in OLMo 2."""
        return bool(_HEAD_NORM.search(name)) and shape[0] != self.head_dim

    def _rows(self, heads: Part) -> Part:
        return heads[0] * self.head_dim, heads[1] * self.head_dim


def plan_shard(config: Any, rank: int, size: int) -> ShardPlan:
    """Divides a model of this configuration. Raises ConfigurationError if it cannot be divided into ``size`` parts."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    channels, vocabulary = int(config.intermediate_size), int(config.vocab_size)
    for name, count in (("query heads", heads), ("feed-forward channels", channels), ("tokens", vocabulary)):
        if size > count:
            raise ConfigurationError(
                f"tensor_parallel_size is {size}, and the model has {count} {name}; allowed are 1 to {count}"
            )
    if experts := num_experts(config):
        raise ConfigurationError(
            f"tensor_parallel_size is {size}, and a mixture of {experts} experts is not divided among ranks; use 1"
        )
    group = heads // kv_heads
    if kv_heads >= size:
        kv = _part(kv_heads, rank, size)
        queries = kv[0] * group, kv[1] * group
    else:
        key = rank * kv_heads // size
        together = [other for other in range(size) if other * kv_heads // size == key]
        if len(together) > group:
            raise ConfigurationError(
                f"tensor_parallel_size is {size}, and the model has {heads} query heads over {kv_heads} key heads; "
                f"allowed are 1 to {kv_heads * group}"
            )
        kv, queries = (key, key + 1), _moved(_part(group, together.index(rank), len(together)), key * group)
    unit = next(unit for unit in _CHANNEL_UNITS if channels % unit == 0 and channels // unit >= size)
    first, end = _part(channels // unit, rank, size)
    return ShardPlan(
        rank=rank,
        size=size,
        heads=queries,
        kv_heads=kv,
        channels=(first * unit, end * unit),
        vocabulary=tuple(_vocabulary_part(vocabulary, other, size) for other in range(size)),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        all_heads=heads,
        all_kv_heads=kv_heads,
        all_channels=channels,
    )


def _vocabulary_part(tokens: int, rank: int, size: int) -> Part:
    unit = _VOCABULARY_UNIT if tokens >= size * _VOCABULARY_UNIT else 1
    first, end = _part(tokens // unit, rank, size)
    return first * unit, tokens if rank == size - 1 else end * unit


def _part(count: int, rank: int, size: int) -> Part:
    """Part of ``count`` units. Earlier ranks get the smaller parts, because rank 0 also schedules and samples."""
    return rank * count // size, (rank + 1) * count // size


def _moved(part: Part, by: int) -> Part:
    return part[0] + by, part[1] + by
