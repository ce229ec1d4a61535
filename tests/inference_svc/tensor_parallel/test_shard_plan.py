"""Shard plan: the parts of all ranks are the whole model."""

from __future__ import annotations

import pytest
import transformers as t
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.errors import ConfigurationError, ModelUnsupported

from inference_svc.models.tensor_parallel.shard_plan import plan_shard


def config(heads: int, kv_heads: int, channels: int = 1536, vocabulary: int = 49152) -> t.LlamaConfig:
    return t.LlamaConfig(
        hidden_size=heads * 64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=channels,
        vocab_size=vocabulary,
    )


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 8), st.integers(1, 300), st.integers(1, 3000))
def test_parts_are_the_whole_model(groups: int, kv_heads: int, size: int, channels: int, vocabulary: int) -> None:
    shape = config(groups * kv_heads, kv_heads, channels * 8, vocabulary + 8)
    try:
        plans = [plan_shard(shape, rank, size) for rank in range(size)]
    except ConfigurationError:
        assert size > min(groups * kv_heads, channels * 8)
        return
    for name, whole in (("heads", groups * kv_heads), ("channels", channels * 8)):
        parts = [getattr(plan, name) for plan in plans]
        assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == whole
        assert all(end > first for first, end in parts)
    assert {plan.vocabulary for plan in plans} == {plans[0].vocabulary}
    assert plans[0].vocabulary[-1][1] == vocabulary + 8
    for plan in plans:
        # Each query head is with the key head that it attends to, and all key heads have as many query heads.
        keys = {head // groups for head in range(*plan.heads)}
        assert keys == set(range(*plan.kv_heads))
        assert plan.num_heads % plan.num_kv_heads == 0


def test_smollm2_is_divided_by_two() -> None:
    """Nine query heads over three key heads: the ranks' parts differ."""
    first, second = (plan_shard(config(9, 3), rank, 2) for rank in range(2))
    assert (first.heads, first.kv_heads, first.channels) == ((0, 3), (0, 1), (0, 768))
    assert (second.heads, second.kv_heads, second.channels) == ((3, 9), (1, 3), (768, 1536))


def test_key_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    plans = [plan_shard(config(8, 2), rank, 4) for rank in range(4)]
    assert [plan.kv_heads for plan in plans] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [plan.heads for plan in plans] == [(0, 2), (2, 4), (4, 6), (6, 8)]


@pytest.mark.parametrize(
    ("shape", "size", "said"),
    [
        (config(2, 1), 4, "the model has 2 query heads; allowed are 1 to 2"),
        (config(8, 4, channels=3), 4, "the model has 3 feed-forward channels"),
        (t.MixtralConfig(num_local_experts=4), 2, "a mixture of 4 experts is not divided among ranks; use 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(shape: t.PretrainedConfig, size: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"tensor_parallel_size is {size}.*{said}"):
        plan_shard(shape, 0, size)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.0\.mixer\.weight cannot be divided"):
        plan_shard(config(9, 3), 0, 2).slices_of("model.layers.0.mixer.weight", (8, 8))
