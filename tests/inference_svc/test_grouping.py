"""Decoding sequences that attend in one call get the bits they get alone."""

from __future__ import annotations

import random

import pytest
import torch

from inference_svc.engine import rows
from inference_svc.engine.forward import Decoder
from inference_svc.engine.grouping import AttentionPlan
from inference_svc.engine.pool import BlockTable
from tests.inference_svc.test_architectures import build


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([40, 40, 40, 40], 1),  # equal sizes, admitted together
        ([40, 200], 1),  # any two
        ([40, 300, 33, 90, 64], 3),  # unequal: pairs and what is left
        ([40, 600, 70, 650], 2),  # different numbers of key blocks do not mix
    ],
)
def test_grouped_and_alone_agree(lengths: list[int], calls: int) -> None:
    rng = random.Random(0)
    loaded, _, pool = build("Qwen2ForCausalLM", torch.float32)
    decoder = Decoder(loaded)
    pool.last_blocks = decoder.last_blocks()
    tables: list[BlockTable] = []
    for length in lengths:
        table = pool.allocate(length + 1)
        assert table is not None
        prompt = [rng.randrange(500) for _ in range(length)]
        decoder(rows.build([rows.Span(prompt, 0, table, False)], pool, loaded.device))
        tables.append(table)
    spans = [rows.Span([rng.randrange(500)], n, t, True) for n, t in zip(lengths, tables, strict=True)]
    batch = rows.build(spans, pool, loaded.device)
    assert len(AttentionPlan(batch, 4, 2, 16)._groups) == calls
    together = decoder(batch)
    for i, span in enumerate(spans):
        alone = decoder(rows.build([span], pool, loaded.device))
        assert torch.equal(alone[0], together[i])
