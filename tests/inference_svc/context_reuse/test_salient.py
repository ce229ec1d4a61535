"""The repair for real language models: what it chooses, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.reuse_plan import RelocatedSpan, ReusePlan
from inference_svc.context_reuse.selectors import SELECTORS, SelectionSignals
from inference_svc.models.loader import load

SALIENT = SELECTORS["salient"]


def test_a_token_must_be_looked_at_and_have_changed() -> None:
    plan = ReusePlan(12, 2, (RelocatedSpan(2, 6), RelocatedSpan(7, 11)))
    attention = np.array([9.0, 0.0, 1.0, 1.0, 0.0, 5.0, 1.0, 1.0])
    deviation = np.array([0.0, 9.0, 2.0, 0.1, 9.0, 1.0, 0.1, 0.1])
    chosen = SALIENT.select(plan, 0.25, SelectionSignals(deviation, attention))
    assert chosen.tolist() == [4, 8], "neither the most looked at (2) nor the most changed (3 and 7)"


@pytest.fixture(scope="module")
def lab() -> ReuseLab:
    return ReuseLab(load("demo", dtype="float32"), 512)


@pytest.mark.parametrize("ratio", [0.15, 0.3])
def test_it_costs_two_layers_a_look_and_the_chosen_rows(lab: ReuseLab, ratio: float) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(10, 400, 60).tolist() for _ in range(5)]
    question = rng.integers(10, 400, 20).tolist()
    read = lab.documents([1], parts)
    tokens, at = read.tokens + question, np.arange(301, 321)
    first, placed = read.stored_in_order([4, 2, 0, 1, 3], 16)
    got = lab.reuse(tokens, first, placed, SALIENT, ratio, at)
    layers, share = lab.decoder.layers, 20 / 320
    again = 2 / layers + ratio * (1 - share) * (1 - 2 / layers)
    assert got.recomputed_ratio == pytest.approx(ratio, abs=0.01)
    # The question is read twice: to see where it looks, and over what was repaired.
    assert got.cost == pytest.approx(again + share * (2 - 2 / layers), abs=0.005)
    assert got.cost - share <= ratio + 2 / layers + share + 0.03
    none = lab.reuse(tokens, first, placed, SELECTORS["none"], 0.0, at)
    assert none.cost == pytest.approx(share)


def test_an_answer_that_is_given_is_predicted_as_when_it_is_generated(lab: ReuseLab) -> None:
    tokens, at = list(range(10, 60)), np.asarray([49])
    generated = lab.full_prefill(tokens, at, go_on=6)
    given = lab.full_prefill(tokens, at, answer=generated.greedy_tokens)
    assert given.answer_logits.argmax(-1).tolist() == generated.greedy_tokens
    np.testing.assert_allclose(given.answer_logits.numpy(), generated.answer_logits.numpy(), atol=1e-4)
