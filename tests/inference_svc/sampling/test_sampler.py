"""Drawing tokens: every processor against a plain reference, and a row alone against the same row among others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar.errors import GenerationFailed, InvalidRequest
from numpy.typing import NDArray

from inference_svc.sampling import sampler as module
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sampling.penalties import TokenCounts
from inference_svc.sampling.sampler import sample
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sampling.sampling_state import SamplingState

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])


def one(sampler: SamplingState, logits: torch.Tensor = LOGITS) -> int:
    (drawn,) = sample(logits[None], [sampler])
    assert isinstance(drawn, SampledToken)
    sampler.accept(drawn.token)
    return drawn.token


def draws(n: int = 400, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    sampler = SamplingState(SamplingParams(seed=1, **params))
    return [one(sampler, logits) for _ in range(n)]


def many(n: int, logits: torch.Tensor, **params: Any) -> list[int]:
    """The first tokens of so many seeds, drawn as one batch."""
    samplers = [SamplingState(SamplingParams(seed=seed, **params)) for seed in range(n)]
    return [d.token for d in sample(logits.repeat(n, 1), samplers) if isinstance(d, SampledToken)]


def reference(logits: NDArray[Any], p: SamplingParams, prompt: list[int], answer: list[int]) -> NDArray[np.float64]:
    """The distribution of the next token, one step after the other, with a sort, in float64."""
    x = logits.astype(np.float64)
    if p.allowed_tokens is not None:
        x[[i for i in range(len(x)) if i not in p.allowed_tokens]] = -np.inf
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(answer):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(answer):
        x[token] -= p.presence_penalty + p.frequency_penalty * answer.count(token)
    x = (x - x.max()) / p.temperature
    x[x < (math.log(p.min_p) if p.min_p else -np.inf)] = -np.inf
    if 0 < p.top_k < len(x):
        x[x < np.sort(x)[-p.top_k]] = -np.inf
    chances = np.exp(x) / np.exp(x).sum()
    _, at = np.unique(-chances, return_inverse=True)
    mass = np.bincount(at, chances)
    chances[(mass.cumsum() - mass)[at] >= p.top_p] = 0
    return chances / chances.sum()


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 10_000]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {0: 5.0, 3: -100.0}]),
    allowed_tokens=st.sampled_from([None, frozenset(range(0, 700, 2))]),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(params, st.integers(0, 10**6)), min_size=1, max_size=6))
def test_a_row_is_drawn_from_its_own_distribution_whatever_is_beside_it(given: list[tuple[Any, int]]) -> None:
    """700 tokens: neither a block of them nor a multiple of one."""
    prompt, answer = [1, 2, 5, 5], [5, 9, 9]
    logits = torch.stack([torch.randn(700, generator=torch.Generator().manual_seed(seed)) * 4 for _, seed in given])
    before = logits.clone()

    def samplers() -> list[SamplingState]:
        out = [SamplingState(SamplingParams(**{**vars(p), "seed": seed}), None, prompt) for p, seed in given]
        for sampler in out:
            for token in answer:
                sampler.accept(token)
        return out

    together = [d.token for d in sample(logits, samplers()) if isinstance(d, SampledToken)]
    alone = [one(sampler, row) for sampler, row in zip(samplers(), logits, strict=True)]
    assert together == alone
    assert torch.equal(logits, before)
    for token, row, (p, _) in zip(together, logits, given, strict=True):
        assert reference(row.numpy(), p, prompt, answer)[token] > 0


@pytest.mark.parametrize(
    "p",
    [
        {},
        {"top_p": 0.8},
        {"top_p": 0.5, "temperature": 2.0},
        {"top_k": 3, "top_p": 0.75},
        {"min_p": 0.1},
        {"top_k": 2},
        {"logit_bias": {4: 4.0}, "top_p": 0.9},
    ],
)
def test_frequencies_are_those_of_the_reference(p: dict[str, Any]) -> None:
    found = many(3000, LOGITS, **p)
    want = reference(LOGITS.numpy(), SamplingParams(**p), [], [])
    for token in range(5):
        assert abs(found.count(token) / 3000 - want[token]) < 0.035


def test_a_flat_distribution_over_a_large_vocabulary_needs_no_sort_and_no_luck() -> None:
    """Nearly everything is in the nucleus, or, of equal chances, nearly nothing may be: neither loops."""
    flat = torch.zeros(50_000)
    assert len(set(many(20, flat, top_p=0.1))) > 10
    steps = -torch.arange(50_000) / 1000
    kept = int((reference(steps.numpy(), SamplingParams(top_p=0.01), [], []) > 0).sum())
    assert max(many(40, steps, top_p=0.01)) < kept


def test_temperature_zero_and_nearly_zero_are_greedy() -> None:
    for temperature in (0.0, 1e-38, 1e-6):
        assert set(draws(temperature=temperature)) == {3}
    assert set(draws(temperature=1e-4)) == {3}


def test_a_seed_repeats_and_another_differs() -> None:
    def by(seed: int) -> list[int]:
        sampler = SamplingState(SamplingParams(seed=seed))
        return [one(sampler) for _ in range(50)]

    assert by(5) == by(5)
    assert by(5) != by(6)
    assert by(2**64 + 5) == by(5)


def test_what_is_drawn_and_dropped_leaves_no_trace() -> None:
    kept, tried = (SamplingState(SamplingParams(seed=3, frequency_penalty=1.0)) for _ in range(2))
    for _ in range(30):
        sample(LOGITS[None], [tried])
        assert one(kept) == one(tried)


@pytest.mark.parametrize(
    "p",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.6},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
)
def test_penalties_are_those_of_the_reference_for_prompt_and_answer(p: dict[str, Any]) -> None:
    """Presence and frequency count what was answered, as OpenAI's do; repetition counts the prompt as well."""
    prompt, answer, n = [3, 3, 1], [2, 2], 3000
    samplers = [SamplingState(SamplingParams(seed=seed, **p), None, prompt) for seed in range(n)]
    for sampler in samplers:
        for token in answer:
            sampler.accept(token)
    found = [d.token for d in sample(LOGITS.repeat(n, 1), samplers) if isinstance(d, SampledToken)]
    want = reference(LOGITS.numpy(), SamplingParams(**p), prompt, answer)
    for token in range(5):
        assert abs(found.count(token) / n - want[token]) < 0.035


def test_penalties_make_repetition_unlikely() -> None:
    assert draws(3, temperature=0.0, presence_penalty=1.5) == [3, 2, 3]
    assert draws(4, temperature=0.0, frequency_penalty=2.0) == [3, 2, 1, 3]
    seen = SamplingState(SamplingParams(temperature=0.0, repetition_penalty=2.0), None, [3])
    assert [one(seen) for _ in range(2)] == [2, 3]


def test_counts_hold_many_tokens() -> None:
    counts = TokenCounts([7, 7, 3])
    assert (counts.ids.tolist(), counts.generated.tolist()) == ([3, 7], [0, 0])
    for token in [*range(100), 7]:
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.generated.tolist(), strict=True)) == dict.fromkeys(range(100), 1) | {
        7: 2
    }


def test_a_mask_leaves_only_what_it_allows() -> None:
    sampler = SamplingState(SamplingParams(seed=1, allowed_tokens=frozenset({0, 4})))
    assert {one(sampler) for _ in range(100)} == {0, 4}
    impossible = LOGITS.clone()
    impossible[[0, 4]] = float("-inf")
    (nothing,) = sample(impossible[None], [sampler])
    assert isinstance(nothing, GenerationFailed)
    assert "no token may be drawn" in str(nothing)


class Counted(frozenset[int]):
    """Tokens that count how often they are listed."""

    listed = 0

    def __iter__(self) -> Iterator[int]:
        self.listed += 1
        return super().__iter__()


def test_a_long_list_is_converted_once() -> None:
    """The conversion happens before the engine's steps, because all streams wait for these."""
    tokens = Counted(range(0, 5, 2))
    sampler = SamplingState(SamplingParams(seed=1, allowed_tokens=tokens, logit_bias={0: 5, 1: 5}))
    sampler.params.check(len(LOGITS))
    before = tokens.listed
    assert {one(sampler) for _ in range(100)} <= {0, 2, 4}
    assert tokens.listed == before


def test_a_large_top_k_beside_a_small_one() -> None:
    logits = torch.linspace(0, 1, 5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    ranked = logits.sort(descending=True).indices.tolist()
    few = frozenset(ranked[:1500])
    params = [{"top_k": 3000}, {"top_k": 20}, {"top_k": 1200, "allowed_tokens": few}] * 300
    samplers = [SamplingState(SamplingParams(seed=seed, **p)) for seed, p in enumerate(params)]  # type: ignore[arg-type]
    drawn = [d.token for d in sample(logits.repeat(len(params), 1), samplers) if isinstance(d, SampledToken)]
    for i, k in enumerate((3000, 20, 1200)):
        assert set(drawn[i::3]) <= set(ranked[:k])
        assert set(drawn[i::3]) - set(ranked[: k // 2])


@pytest.mark.parametrize("k", [1, 2, 20, 64, 700, 4999])
@pytest.mark.parametrize("p", [{}, {"top_p": 0.6}, {"top_p": 0.9, "min_p": 0.02, "temperature": 0.7}])
def test_the_k_largest_alone_give_the_tokens_of_the_whole_vocabulary(k: int, p: dict[str, Any]) -> None:
    """With equal scores at the limit, and with masked tokens, of which the last row has all but 15."""
    made = torch.Generator().manual_seed(k)
    scores = torch.full((40, 5120), -math.inf)
    scores[:, :5000] = (torch.randn(40, 5000, generator=made) * 12).round() / 4
    scores[20:, ::3] = -math.inf
    scores[-1, 15:] = -math.inf
    samplers = [SamplingState(SamplingParams(top_k=k, seed=seed, **p)) for seed in range(40)]
    few = module._draw(scores.clone(), scores.amax(-1), samplers)
    assert few == module._sample_top_p(scores.clone(), scores.amax(-1), samplers)
    assert len(set(few)) > 1


def test_logprobs_are_among_what_may_be_drawn() -> None:
    sampler = SamplingState(SamplingParams(temperature=0.0, allowed_tokens=frozenset({0, 4})), 3)
    (drawn,) = sample(LOGITS[None], [sampler])
    assert isinstance(drawn, SampledToken)
    assert drawn.token == 0
    assert math.exp(drawn.logprob or 0) == pytest.approx(1 / (1 + math.exp(-1)))
    assert [t for t, _ in drawn.top] == [0, 4], "what cannot be drawn has no finite logarithm to report"


@pytest.mark.parametrize("planted", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_fail_alone(planted: float) -> None:
    def samplers() -> list[SamplingState]:
        settings = [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.5}, {"seed": 3, "top_k": 2}] * 2
        return [SamplingState(SamplingParams(**s), 1 if i == 6 else None) for i, s in enumerate(settings)]

    logits = LOGITS.repeat(8, 1)
    want = sample(logits, samplers())
    spoilt = logits.clone()
    spoilt[[0, 1, 6], 2] = planted
    if planted == float("-inf"):  # one impossible token is no failure: all of them are
        spoilt[[0, 1, 6]] = planted
    for i, (outcome, expected) in enumerate(zip(sample(spoilt, samplers()), want, strict=True)):
        if i in (0, 1, 6):
            assert isinstance(outcome, GenerationFailed)
            assert "NaN or infinity" in str(outcome)
        else:
            assert outcome == expected


def test_logprobs_are_those_of_temperature_one_and_of_the_model_alone() -> None:
    bent = SamplingParams(temperature=0.0, logit_bias={0: 50.0})
    for p, token in ((SamplingParams(temperature=0.0), 3), (bent, 0)):
        (drawn,) = sample(LOGITS[None], [SamplingState(p, 2)])
        assert isinstance(drawn, SampledToken)
        want = torch.log_softmax(LOGITS, -1)
        assert drawn.token == token
        assert drawn.logprob == pytest.approx(float(want[token]))
        assert [t for t, _ in drawn.top] == [3, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5),
     ("top_k", -1), ("top_k", 2**33), ("min_p", 1.1), ("repetition_penalty", 0.0), ("presence_penalty", 3.0),
     ("frequency_penalty", -2.5), ("repetition_penalty", 1e-38), ("repetition_penalty", 0.0099)],
)  # fmt: skip
def test_values_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_tokens_that_do_not_exist_are_named() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias of token 3 is 200"):
        SamplingParams(logit_bias={3: 200.0})
    with pytest.raises(InvalidRequest, match="allowed_tokens must name at least one"):
        SamplingParams(allowed_tokens=frozenset())
    with pytest.raises(InvalidRequest, match="logit_bias has token 5, outside the vocabulary of 5"):
        SamplingParams(logit_bias={5: 1.0}).check(5)


def test_a_repetition_penalty_makes_no_token_likelier() -> None:
    """Of a negative logit it takes something, too, instead of dividing it towards zero."""
    seen = SamplingState(SamplingParams(temperature=0.0, repetition_penalty=2.0), None, [1])
    assert one(seen, torch.tensor([-3.0, -2.0, -9.0])) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.1e-5, 2.0])
@pytest.mark.parametrize("top_p", [1e-38, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 1e-38, 1.0])
def test_the_smallest_values_leave_a_token(temperature: float, top_p: float, min_p: float) -> None:
    smallest = float(np.float32(0.01))  # as a request carries it
    params = SamplingParams(temperature, top_p, min_p=min_p, repetition_penalty=smallest, logit_bias={1: 100.0}, seed=1)
    assert one(SamplingState(params, None, range(5)), 10_000 * LOGITS) == 3


def test_an_answer_does_not_end_before_min_tokens() -> None:
    sampler = SamplingState(SamplingParams(temperature=0.0, min_tokens=2), stops=[3])
    assert [one(sampler) for _ in range(3)] == [2, 2, 3]
