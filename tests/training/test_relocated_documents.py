"""Relocated documents in training equal the lab's reuse without repair."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.models.loader import DEMO_MODEL, load
from training import relocated_documents

ROW = relocated_documents.DocumentRow(
    [[1], [5, 300, 301, 302], [5, 400, 401], [5, 500, 501, 502, 503]], [6, 300, 301, 302], [2, 3]
)
LONGER = relocated_documents.DocumentRow([[1], [5, 600] * 3, [5, 601], [5, 602]], [6, 600, 601, 602, 603], [1])


class Order(random.Random):
    """Random generator that always returns the same order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self._order = order

    def sample(self, population, k, *, counts=None):  # type: ignore[no-untyped-def]
        return self._order


def logits(order: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        hidden, tokens, learned = relocated_documents.tails(model, [ROW, LONGER], Order(order))
        assert tokens[0][learned[0]].tolist() == [301, 302]
        return model.lm_head(hidden[0, : len(ROW.tail)])


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_equals_reuse_without_repair(order: list[int]) -> None:
    lab = ReuseLab(load("demo", dtype="float32"), 512)
    head, *documents = ROW.documents
    read = lab.documents(head, documents)
    tokens = read.tokens + ROW.tail
    at = np.arange(len(read.tokens), len(tokens))
    exact, placed = read.stored_in_order([i - 1 for i in order], 16)
    found = lab.reuse(tokens, exact, placed, SELECTORS["none"], 0.0, at).logits
    torch.testing.assert_close(logits(order), found, atol=1e-3, rtol=1e-3)
