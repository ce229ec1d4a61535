"""How much is guessed follows what is measured: nothing where it does not pay, and again where it does."""

from __future__ import annotations

from collections.abc import Sized

import pytest
import torch

from inference_svc.scheduling.scheduler import SchedulerEntry, plan_step
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.spec_decode.acceptance_stats import AcceptanceStats
from inference_svc.spec_decode.draft_budget import DraftNode, StepCosts, select_drafts
from inference_svc.spec_decode.proposer import ROOT, Draft
from inference_svc.spec_decode.step_cost_model import StepCostModel
from tests.inference_svc.spec_decode.chance import (
    VOCABULARY,
    Table,
    answers,
    free_rows,
    loop_of,
    prompt,
    sequence,
    table,
)


def cycle() -> Table:
    """Always the next token: every guess is right once the cycle was seen."""
    logits = torch.full((VOCABULARY, VOCABULARY), -20.0)
    for token in range(VOCABULARY):
        logits[token, (token + 1) % VOCABULARY] = 20.0
    return Table(logits)


def priced(by_row: float) -> StepCostModel:
    """Every row beyond the first takes so much of a pass."""
    costs = free_rows()
    costs.calibrate({1: 1.0, 512: 1.0 + by_row * 511}, 1.0)
    return costs


def test_where_guesses_are_right_and_rows_are_free_they_are_deep() -> None:
    model = cycle()
    loop = loop_of(model)
    answers(loop, [sequence(prompt(0), 400, temperature=0.0)])
    assert model.passes < 60


def test_a_batch_that_keeps_the_device_busy_guesses_nothing() -> None:
    """Each row costs what a sequence's own one does: not even right guesses gain anything."""
    model = cycle()
    loop = loop_of(model, costs=priced(1.0))
    answers(loop, [sequence(prompt(i, 8), 100, temperature=0.0) for i in range(16)])
    assert loop._speculator.stats.draft_tokens == 0
    assert loop._speculator.stats.draft_seconds == 0, "nothing was even looked up"


def test_wrong_guesses_cost_next_to_nothing() -> None:
    """Any token may come next, and rows are dear: what was tried is less than two passes in a hundred."""
    model, costs = Table(torch.zeros(VOCABULARY, VOCABULARY)), priced(0.2)
    loop = loop_of(model, costs=costs)
    answers(loop, [sequence(prompt(i), 1000, seed=i) for i in range(4)])
    lost = loop._speculator.stats.draft_tokens - loop._speculator.stats.accepted_tokens
    assert lost * 0.2 < 0.02 * model.passes


def test_guesses_come_back_when_they_are_right_again() -> None:
    """First noise, then a cycle: what was guessed is compared also where it was not verified."""
    noise, order, costs = torch.zeros(VOCABULARY, VOCABULARY), cycle().logits, priced(0.1)
    model = Table(noise)
    loop = loop_of(model, costs=costs)
    answers(loop, [sequence(prompt(0), 800, seed=1)])
    model.logits, model.passes = order, 0
    answers(loop, [sequence(prompt(1), 400, temperature=0.0)])
    assert model.passes < 150


def test_costs_follow_the_machine() -> None:
    costs = StepCostModel(recorded=False)
    costs.calibrate({4: 0.01, 8: 0.012, 16: 0.016, 32: 0.024}, 0.01)
    assert costs.seconds(64, True) == pytest.approx(0.04, rel=0.05), "drawn out beyond what was measured"
    for _ in range(60):
        costs.learn(4, False, 0.02)
    assert costs.seconds(4, False) == pytest.approx(0.02, rel=0.05)
    assert costs.seconds(16, True) > 0.025, "what slows few rows down slows many down"
    costs.learn(4, False, 5.0)
    assert costs.seconds(4, False) < 0.03, "a pass that was interrupted is no price"


def test_a_second_row_is_not_free_where_it_was_measured_not_to_be() -> None:
    """As on a CPU whose products take what rows there are: two rows cost half as much again as one."""
    costs = StepCostModel(recorded=False)
    costs.calibrate({1: 0.010, 2: 0.015, 4: 0.015, 8: 0.02}, 0.010)
    assert costs.seconds(1, False) == pytest.approx(0.010)
    assert costs.seconds(2, True) == costs.seconds(3, True) == pytest.approx(0.015)
    unsure = [DraftNode(0.4, 0, 0, ROOT)]
    prices = StepCosts(lambda more: costs.seconds(1 + more, True), 0.0, 1)
    assert select_drafts(unsure, [1], prices).rate < 1 / costs.seconds(1, False), "it would be slower than without"


def test_recorded_passes_have_their_own_price() -> None:
    costs = StepCostModel(recorded=True)
    costs.calibrate({4: 0.025, 8: 0.025}, 0.005)
    assert costs.seconds(1, False) == pytest.approx(0.005)
    assert costs.seconds(4, True) == pytest.approx(0.025)


def test_chances_are_measured_for_all_and_for_each() -> None:
    acceptance = AcceptanceStats((0.5, 0.5))
    good, bad = acceptance.new_counts(), acceptance.new_counts()
    for _ in range(200):
        acceptance.learn(good, 0, True)
        acceptance.learn(bad, 0, False)
    assert acceptance.chance(good, 0) > 0.9
    assert acceptance.chance(bad, 0) < 0.1
    assert acceptance.chance(acceptance.new_counts(), 0) == pytest.approx(0.5, abs=0.1)
    assert acceptance.chance(good, 1) == 0.5


def test_a_draft_that_takes_too_long_is_tried_ever_more_rarely() -> None:
    model = table()

    class Slow:
        priors, step_seconds, asked = (0.5,), 10.0, 0

        def propose(self, requests: Sized) -> list[Draft]:
            self.asked += 1
            return [Draft.chain([0], [0])] * len(requests)

        def observe(self, *_: object) -> None: ...
        def finish(self, *_: object) -> None: ...
        def forget(self, *_: object) -> None: ...

    slow = Slow()
    loop = loop_of(model, {SpeculationMode.DRAFT: slow})
    answers(loop, [sequence(prompt(0), 2000, SpeculationMode.DRAFT, seed=1)])
    assert 3 <= slow.asked <= 12


# ---- rows and pages --------------------------------------------------------------------------------------------


def test_guesses_get_what_is_left() -> None:
    works = [
        SchedulerEntry(0, 1, 40, 1, num_draft_tokens=8),
        SchedulerEntry(1, 1, 2, 1, num_draft_tokens=8),
        SchedulerEntry(2, 300, 400, 1),
    ]
    step = plan_step(works, 512, 0, 32)
    assert dict(step.rows) == {0: 1, 1: 1, 2: 300}
    assert dict(step.draft_rows) == {0: 8, 1: 1}, "no page is free, and one has room for one more"
    assert dict(plan_step(works, 512, 1, 32).draft_rows) == {0: 8, 1: 8}
    assert dict(plan_step(works, 306, 1, 32).draft_rows) == {0: 4}, "the budget ends"
    assert plan_step(works, 100, 1, 32).draft_rows == (), "prompts come first"


def test_guesses_preempt_nobody() -> None:
    works = [SchedulerEntry(0, 1, 1, 1, num_draft_tokens=30), SchedulerEntry(1, 1, 0, 1)]
    step = plan_step(works, 64, 1, 32)
    assert not step.preempted
    assert dict(step.rows) == {0: 1, 1: 1}
    assert not step.draft_rows
