"""The RoPE table has the values of the model's rotary module, and computes each part once, when it is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from inference_svc.model_runner.rope_table import RopeTable

DIM = 16
LIKE = torch.zeros(1, 64)


class CountingRotary:
    """A model's rotary module, which records the positions that it computes."""

    def __init__(self) -> None:
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=10_000)
        self.module: Any = LlamaRotaryEmbedding(config)
        self.computed: list[tuple[int, int]] = []

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.computed.append((int(positions[0, 0]), int(positions[0, -1]) + 1))
        found: tuple[Tensor, Tensor] = self.module(like, positions)
        return found


@pytest.mark.parametrize("capacity", [100, 10_000, 1 << 30])
def test_the_rows_are_those_of_the_rotary_module(capacity: int) -> None:
    rotary = CountingRotary()
    table = RopeTable(rotary, capacity, DIM)
    for positions in (torch.tensor([3, 0, 3]), torch.tensor([4095, 4096]), torch.tensor([20_000, 5, 12_288])):
        cos, sin = table.at(positions, LIKE)
        wanted_cos, wanted_sin = rotary.module(LIKE[None], positions[None])
        assert torch.equal(cos, wanted_cos[0])
        assert torch.equal(sin, wanted_sin[0])


def test_a_part_is_computed_once_and_only_when_a_position_needs_it() -> None:
    rotary = CountingRotary()
    table = RopeTable(rotary, 1 << 17, DIM)
    for last in (0, 4095, 4096, 10, 9000):
        table.at(torch.tensor([last]), LIKE)
    assert rotary.computed == [(0, 4096), (4096, 8192), (8192, 12288)]
