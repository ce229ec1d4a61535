"""Prompts are read in pieces that fit into a step's time, while others decode."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from inference_svc.engine.engine import Engine
from inference_svc.model_runner import forward_batch as rows
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.scheduling.scheduler import SchedulerEntry, plan_step
from inference_svc.sequence.sequence import SequenceOutput
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, small_engine

PAGE, ROW_SECONDS = 32, 0.0005


def test_rows_fit_into_the_budget() -> None:
    pace = PrefillBudget(0.25)
    assert pace.max_rows is None, "nothing is known"
    for _ in range(50):
        pace.learn(0, 0.03)
        pace.learn(512, 0.03 + 512 * 0.0019)
    rows = pace.max_rows
    assert rows is not None
    assert 0.2 < 0.03 + rows * 0.0019 <= 0.25
    assert pace.seconds(rows) == pytest.approx(0.03 + rows * 0.0019, rel=0.05)


def test_no_budget_is_no_limit() -> None:
    pace = PrefillBudget(0.0)
    pace.learn(0, 1.0)
    pace.learn(64, 60.0)
    assert pace.max_rows is None


def test_one_interrupted_step_hardly_changes_the_rows() -> None:
    pace = PrefillBudget(0.25)
    for _ in range(20):
        pace.learn(0, 0.03)
        pace.learn(128, 0.25)
    before = pace.max_rows
    pace.learn(128, 30.0)
    assert before is not None
    assert pace.max_rows is not None
    assert pace.max_rows >= before * 0.7


def test_prompts_go_on_where_a_step_takes_long_by_itself() -> None:
    """As where layers are read from disk in every pass: fewer rows would not shorten it."""
    pace = PrefillBudget(0.25)
    for _ in range(20):
        pace.learn(0, 10.0)
        pace.learn(256, 11.0)
    assert pace.max_rows is not None
    assert pace.max_rows >= 256


def test_only_prompts_beside_decoding_sequences_are_limited() -> None:
    decoding, long = SchedulerEntry(1, 1, 99, 1), SchedulerEntry(2, 1000, 10**4, 1)
    assert dict(plan_step([decoding, long], 512, 0, PAGE, prompt_rows=96).rows) == {0: 1, 1: 96}
    assert dict(plan_step([long], 512, 0, PAGE, prompt_rows=96).rows) == {0: 512}
    many = [SchedulerEntry(i, 1, 99, 1) for i in range(64)]
    rows = dict(plan_step([*many, long], 512, 0, PAGE, prompt_rows=32).rows)
    assert len(rows) == 65, "all that decode go on"
    assert rows[64] == 32


def longest_gap(engine: Engine, length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most rows between two tokens of a stream beside a cold prompt of 480. Each row takes its time."""
    computed, seen, stream = 0, list[int](), Request(prompt(1, 40), length)
    compute, sink = engine._core.compute, stream.sequence.sink

    def slow(spans: list[rows.SequenceSlice]) -> torch.Tensor:
        nonlocal computed
        count = sum(len(span.tokens) for span in spans)
        computed += count
        time.sleep(ROW_SECONDS * count)
        return compute(spans)

    def note(output: SequenceOutput) -> None:
        seen.append(computed)
        sink(output)

    monkeypatch.setattr(engine._core, "compute", slow)
    stream.sequence.sink = note
    engine.submit(stream.sequence)
    while len(seen) < 3:
        time.sleep(0.001)
    cold = Request(prompt(2, 480), 1)
    engine.submit(cold.sequence)
    cold.tokens()
    engine.cancel(stream.sequence)
    assert stream.ended.wait(20)
    return max(after - before for before, after in pairwise(seen))


def test_a_stream_goes_on_beside_a_cold_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = list[int]()
    for budget in (0.0, 0.04):
        engine = small_engine(4096, max_prefill_step_seconds=budget)
        engine._core.prefill_budget._row, engine._core.prefill_budget._fixed = ROW_SECONDS, 0.002
        gaps.append(longest_gap(engine, 3000, monkeypatch))
        engine.stop()
    unlimited, limited = gaps
    assert unlimited >= 480
    assert limited < unlimited / 2
