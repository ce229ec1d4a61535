"""Guesses change no answer: not a greedy one, not a seeded one, and not the distribution of the others."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from kvkernels.cpu.head_rows import Likeliest
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.engine.engine_core import EngineCore
from inference_svc.engine.speculative_sampler import SpeculativeSampler
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.sequence import Sequence
from tests.inference_svc.spec_decode.chance import VOCABULARY, Table, answers, loop_of, prompt, sequence, table

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"seed": 1},
    {"seed": 2, "temperature": 0.5, "top_p": 0.8},
    {"seed": 3, "top_k": 3, "min_p": 0.05},
    {"seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"seed": 5, "logit_bias": {0: 2.0, 5: -100.0}},
    {"seed": 6, "allowed_tokens": frozenset({0, 2, 3})},
]


@pytest.mark.parametrize("branches", [1, 3])
def test_every_way_of_drawing_gives_the_same_answers(branches: int) -> None:
    """All in one batch, so that rows of guesses and of others are drawn together."""
    model = table()

    def all_of(speculation: SpeculationMode) -> tuple[list[list[int]], EngineCore]:
        loop = loop_of(model, branches=branches)
        mixed = [sequence(prompt(i), 60 + i, speculation, **way) for i, way in enumerate(WAYS * 2)]
        return answers(loop, mixed), loop

    want, without = all_of(SpeculationMode.OFF)
    got, loop = all_of(SpeculationMode.NGRAM)
    assert got == want
    assert without._speculator.stats.drafts == 0
    stats = loop._speculator.stats
    assert stats.draft_tokens > stats.accepted_tokens > 100
    assert stats.accepted_at[0] >= stats.accepted_at[1] > 0
    assert sum(stats.accepted_at) == stats.accepted_tokens
    assert loop._stats.steps < without._stats.steps
    assert (stats.branches > 100) == (stats.branched_tokens > 20) == (branches > 1)
    loop.pool.check_integrity()


def test_usage_counts_what_was_guessed() -> None:
    loop = loop_of(table())
    asked = [sequence(prompt(i), 80, temperature=0.0) for i in range(3)]
    answers(loop, asked)
    assert sum(s.speculation.num_draft_tokens for s in asked) == loop._speculator.stats.draft_tokens
    assert sum(s.speculation.num_accepted_tokens for s in asked) == loop._speculator.stats.accepted_tokens > 0


# ---- the distribution ------------------------------------------------------------------------------------------


class Leaning(SpeculativeSampler):
    """Sampler with a planted bias: draft tokens are a little likelier than they should be."""

    def sample(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        drafts: list[Collection[int]],
        likeliest: Likeliest | None = None,
    ) -> list[bool]:
        logits = logits.clone()
        for line, guessed in zip(logits, drafts, strict=True):
            for guess in guessed:
                line[guess] += 0.8
        return super().sample(sequences, logits, drafts)


class Repeating(SpeculativeSampler):
    """Sampler with another planted bias: in half of the cases, it accepts the draft token, whatever its probability."""

    def sample(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        drafts: list[Collection[int]],
        likeliest: Likeliest | None = None,
    ) -> list[bool]:
        for i, (one, guessed) in enumerate(zip(sequences, drafts, strict=True)):
            if guessed and one.sampling.uniform(63) < 0.5:
                logits = logits.clone()
                logits[i] = torch.full_like(logits[i], -50.0)
                logits[i, next(iter(guessed))] = 0.0
        return super().sample(sequences, logits, drafts)


def transitions(kind: type[SpeculativeSampler], model: Table, n: int, branches: int = 1) -> NDArray[np.int64]:
    """How often each token followed each, of ``n`` drawn tokens."""
    counts, per = np.zeros((VOCABULARY, VOCABULARY), np.int64), 500
    loop = loop_of(model, kind=kind, branches=branches)
    asked = [sequence(prompt(i), per, seed=i, temperature=0.8) for i in range(n // per)]
    for one, answer in zip(asked, answers(loop, asked), strict=True):
        for a, b in itertools.pairwise([one.tokens[one.request.num_prompt_tokens - 1], *answer]):
            counts[a, b] += 1
    assert loop._speculator.stats.accepted_tokens > n / 8
    return counts


def chi_square(counts: NDArray[np.int64], model: Table) -> float:
    want = torch.softmax(model.logits.double() / 0.8, -1).numpy() * counts.sum(-1, keepdims=True)
    return float(((counts - want) ** 2 / want).sum())


# Thirty degrees of freedom: one in a hundred thousand is above.
LIMIT = 74.0


@pytest.mark.parametrize(("branches", "n"), [(1, 20_000), (2, 8_000)])
def test_sampled_answers_have_the_models_distribution(branches: int, n: int) -> None:
    model = table(7)
    assert chi_square(transitions(SpeculativeSampler, model, n, branches), model) < LIMIT


@pytest.mark.parametrize(("biased", "branches"), [(Leaning, 2), (Repeating, 1)])
def test_the_test_sees_a_planted_bias(biased: type[SpeculativeSampler], branches: int) -> None:
    model = table(7)
    assert chi_square(transitions(biased, model, 6_000, branches), model) > LIMIT
