"""Layers divided among ranks: row-parallel products, vocabulary-parallel embedding and head.

Each class wraps the rank's own layer, which may be of any kind, and adds the collective that completes the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.models.linear.plain_linear import in_float32
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from inference_svc.models.tensor_parallel.shard_plan import ShardPlan


class RowParallelLinear(nn.Module):
    """``[..., in / ranks] -> [..., out]``: a product over the rank's inputs, summed over the ranks.

    Only rank 0 has the bias; the other ranks add no bias.
    """

    def __init__(self, local: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.local, self._group = local, group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.sum(self.local(x))


class VocabularyParallelEmbedding(nn.Module):
    """``[..., tokens] -> [..., tokens, hidden]``: each token's row comes from the rank that has it."""

    def __init__(self, local: nn.Module, plan: ShardPlan, group: RankGroup) -> None:
        super().__init__()
        self.local, self._group = local, group
        self._first, self._end = plan.vocabulary[plan.rank]

    def forward(self, tokens: Tensor) -> Tensor:
        mine = (tokens >= self._first) & (tokens < self._end)
        found = self.local((tokens - self._first).where(mine, 0))
        return self._group.sum(found.masked_fill(~mine[..., None], 0))


class VocabularyParallelHead(nn.Module):
    """``[rows, hidden] -> [rows, vocabulary]``: each rank computes the logits of its tokens; rank 0 gets all logits.

    The other ranks get only the logits of their own tokens.
    """

    def __init__(self, local: nn.Module, plan: ShardPlan, group: RankGroup) -> None:
        super().__init__()
        self.local, self._group = local, group
        self._widths = [end - first for first, end in plan.vocabulary]

    def forward(self, states: Tensor) -> Tensor:
        return self._group.gather_columns(in_float32(self.local, states), self._widths)


class FullWidthRMSNorm(nn.Module):
    """RMS norm over the channels of all ranks (OLMo 2's norms of queries and keys), ``[..., channels / ranks]``."""

    def __init__(self, local: Any, channels: int, group: RankGroup) -> None:
        super().__init__()
        self.weight, self._epsilon = local.weight, float(local.variance_epsilon)
        self._channels, self._group = channels, group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = self._group.sum(wide.square().sum(-1, keepdim=True))
        normed: Tensor = self.weight * (wide * torch.rsqrt(squares / self._channels + self._epsilon))
        return normed.to(x.dtype)


def parallelize(model: Any, plan: ShardPlan, group: RankGroup) -> None:
    """Wraps the layers of a model that has one rank's weights, so that it computes with the other ranks."""
    inner = model.model
    for layer in inner.layers:
        attention, feed_forward = layer.self_attn, layer.mlp
        attention.o_proj = RowParallelLinear(attention.o_proj, group)
        feed_forward.down_proj = RowParallelLinear(feed_forward.down_proj, group)
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            if channels := getattr(norm, "all_channels", 0):
                setattr(attention, name, FullWidthRMSNorm(norm, channels, group))
    inner.embed_tokens = VocabularyParallelEmbedding(inner.embed_tokens, plan, group)
    model.lm_head = VocabularyParallelHead(model.lm_head, plan, group)
