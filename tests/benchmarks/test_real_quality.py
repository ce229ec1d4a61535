"""Real-text quality: prompts, oracle and figures, with the built-in model."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.planted_bugs import planted_bug
from benchmarks.real_prompts import CONTROLS, SAMPLE, TASKS, TEXTS, RealSamples
from benchmarks.real_quality import PromptResult, row, summary
from benchmarks.recompute_oracle import FullPrefill, oracle_outcome
from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.models.loader import load


@pytest.fixture(scope="module")
def lab() -> ReuseLab:
    return ReuseLab(load("demo", dtype="float32"), 4096)


def test_the_sample_is_small_and_every_line_says_whose_it_is() -> None:
    assert SAMPLE.stat().st_size < 320_000
    assert all('"source": "' in line and '"licence": "' in line for line in SAMPLE.read_text().splitlines())


@pytest.mark.parametrize("kind", [*TEXTS, *TASKS, *CONTROLS])
def test_prompts_are_the_same_for_the_same_seed_and_have_documents_to_shuffle(lab: ReuseLab, kind: str) -> None:
    samples = RealSamples(lab.loaded.tokenizer)
    one, same, other = (samples.draw(kind, random.Random(seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert len(one.documents) >= 2
    assert one.question
    assert bool(one.answer) == (kind in ("bugs", *CONTROLS))


def test_a_planted_bug_stands_in_the_line_that_is_the_answer() -> None:
    for seed in range(20):
        found = planted_bug(random.Random(seed), 6)
        clean = planted_bug_lines(found.functions)
        assert len(clean) == len(set(clean)), "lines are numbered through"
        assert found.line in clean


def planted_bug_lines(functions: tuple[str, ...]) -> list[int]:
    return [int(line.split(":")[0]) for text in functions for line in text.split("\n")]


def test_the_oracle_with_all_tokens_is_full_prefill_and_with_none_is_no_repair(lab: ReuseLab) -> None:
    prompt = RealSamples(lab.loaded.tokenizer).draw("bugs", random.Random(3))
    read = lab.documents(prompt.head, prompt.documents)
    tokens, start = read.tokens + prompt.question, len(read.tokens)
    at = np.arange(start, len(tokens))
    first, placed = read.stored_in_order(list(range(len(prompt.documents)))[::-1], 16)
    truth = FullPrefill.of(lab, tokens, start, answer=prompt.answer)
    full = truth.outcome
    assert np.array_equal(full.logits, lab.full_prefill(tokens, at).logits)

    def kl(ratio: float) -> float:
        got = oracle_outcome(lab, truth, tokens, first, placed, ratio, at, prompt.answer)
        return float(np.mean(PromptResult.of(full, got, prompt.answer, True, 0.1).kl))

    none = lab.reuse(tokens, first, placed, SELECTORS["none"], 0.0, at, answer=prompt.answer)
    lost = float(np.mean(PromptResult.of(full, none, prompt.answer, True, 0.1).kl))
    assert kl(1.0) < 1e-6 < lost
    assert kl(0.0) == pytest.approx(lost, rel=1e-3)
    assert kl(0.3) < lost


def test_the_summary_says_what_is_regained_and_whether_controls_are_harmed() -> None:
    def found(kl: float) -> PromptResult:
        return PromptResult([kl] * 4, [True] * 4, True, None, None, 0.15, 0.3, 0.1, 1.0, 2.0)

    kl = {"none": 0.1, "cacheblend": 0.08, "guided": 0.07, "salient": 0.04, "oracle": 0.03}
    rows = [row("none", kind, [found(0.1 if kind in TEXTS else 0.0)] * 2) for kind in (*TEXTS, *CONTROLS)]
    for name in ("cacheblend", "guided", "salient", "oracle"):
        for ratio in (0.15, 0.3):
            worse = 0.02 if name == "guided" else 0.0
            rows += [row(f"{name}_r{ratio:g}", k, [found(kl[name])] * 2) for k in TEXTS]
            rows += [row(f"{name}_r{ratio:g}", k, [found(worse)] * 2) for k in CONTROLS]
    out = summary(rows, 30)
    assert out["regained_salient_r0.15"] == pytest.approx(0.6)
    assert out["regained_oracle_r0.3"] == pytest.approx(0.7)
    assert out["control_harmed_guided_r0.15"]
    assert not out["control_harmed_salient_r0.15"]
    assert out["cost_salient_r0.15"] == pytest.approx(0.2)
    assert out["cost_bound_salient_r0.15"] == pytest.approx(0.15 + 2 / 30 + 0.1 + 0.03, abs=1e-4)
