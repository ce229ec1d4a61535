"""Drawing tokens: every processor against a plain reference, and a row alone against the same row among others."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar.errors import GenerationFailed, InvalidRequest, PromptTooLong
from kvsidecar.inference.v1.inference_pb2 import Sampling
from kvsidecar.requests import REST_OF_CONTEXT, to_request
from numpy.typing import NDArray

from inference_svc.models.loader import DEMO_MODEL, load
from inference_svc.request.request_builder import RequestBuilder
from inference_svc.request.request_options import DEFAULT_MAX_TOKENS
from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sampling.penalties import TokenCounts
from inference_svc.sampling.sampler import sample
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sampling.sampling_state import SamplingState
from inference_svc.sequence.sequence import Sequence

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
    """NumPy selects for the large ones, torch for the others; masked tokens count as the least likely."""
    logits = torch.linspace(0, 1, 5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    ranked = logits.sort(descending=True).indices.tolist()
    few = frozenset(ranked[:1500])
    params = [{"top_k": 3000}, {"top_k": 20}, {"top_k": 1200, "allowed_tokens": few}] * 300
    samplers = [SamplingState(SamplingParams(seed=seed, **p)) for seed, p in enumerate(params)]  # type: ignore[arg-type]
    drawn = [d.token for d in sample(logits.repeat(len(params), 1), samplers) if isinstance(d, SampledToken)]
    for i, k in enumerate((3000, 20, 1200)):
        assert set(drawn[i::3]) <= set(ranked[:k])
        assert set(drawn[i::3]) - set(ranked[: k // 2])


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
     ("frequency_penalty", -2.5)],
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


def test_what_a_request_leaves_open_is_as_the_models_makers_recommend(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    stated = json.loads((folder / "generation_config.json").read_text())
    recommended = {"do_sample": True, "temperature": 0.25, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(stated | recommended))
    prompter = RequestBuilder(load(str(folder)), 100)
    assert prompter.sampling(Sampling()) == SamplingParams(temperature=0.25, top_k=7)
    assert prompter.sampling(Sampling(temperature=0.0, top_p=0.5)) == SamplingParams(0.0, 0.5, top_k=7)
    (folder / "generation_config.json").write_text(json.dumps(stated | {"do_sample": False}))
    greedy = RequestBuilder(load(str(folder)), 100)
    assert greedy.sampling(Sampling()) == SamplingParams(temperature=0.0)
    assert greedy.sampling(Sampling(temperature=0.5)) == SamplingParams(temperature=0.5)


def test_of_a_prompt_that_is_too_long_the_end_is_read_on_request() -> None:
    prompter = RequestBuilder(load("demo"), 100)
    ids = [7 + i % 5 for i in range(500)]

    def read(most: int) -> Sequence:
        asked = to_request(ids, max_tokens=30, truncate_prompt_tokens=most, segment_ends=[100, 450, 480])
        return prompter.build(asked, lambda _: None, 0.0)

    assert (read(40).tokens, read(40).request.max_tokens) == (ids[-40:], 30)
    assert read(40).request.cache.marks.segment_ends == (20,)
    assert read(0).tokens == ids[-70:], "with room for the answer"
    assert read(0).request.cache.marks.segment_ends == (20, 50)
    with pytest.raises(PromptTooLong, match="the prompt is too long: it has 500 tokens"):
        read(1000)


def test_what_is_read_of_a_long_prompt_leaves_room_for_the_usual_answer() -> None:
    longer = RequestBuilder(load("demo"), 300)
    asked = to_request([7] * 500, truncate_prompt_tokens=0)
    found = longer.build(asked, lambda _: None, 0.0)
    assert (len(found.tokens), found.request.max_tokens) == (300 - DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)
    shorter = RequestBuilder(load("demo"), DEFAULT_MAX_TOKENS)
    for answer in ({}, {"max_tokens": 256}, {"max_tokens": 1, "min_tokens": 300}):
        asked = to_request([7] * 500, truncate_prompt_tokens=0, **answer)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="a context of 256 has none for the prompt then") as caught:
            shorter.build(asked, lambda _: None, 0.0)
        assert caught.value.param == "truncate_prompt_tokens"


def test_who_asks_for_the_rest_of_the_context_gets_that_and_no_more() -> None:
    prompter = RequestBuilder(load("demo"), 300)

    def read(tokens: int, **options: Any) -> Sequence:
        return prompter.build(to_request([7] * tokens, max_tokens=REST_OF_CONTEXT, **options), lambda _: None, 0.0)

    assert [read(tokens).request.max_tokens for tokens in (1, 200, 299)] == [299, 100, 1]
    assert read(100, min_tokens=200).request.max_tokens == 200
    with pytest.raises(InvalidRequest, match="min_tokens is 201, and the answer can have at most 200"):
        read(100, min_tokens=201)
    for cut in ({"truncate_prompt_tokens": 0}, {"truncate": "middle"}):
        long, short = read(500, **cut), read(20, **cut)
        assert (len(long.tokens), long.request.max_tokens) == (300 - DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)
        assert (len(short.tokens), short.request.max_tokens) == (20, 280), "what is not cut leaves more"


def test_a_text_far_too_long_is_not_read_for_its_end() -> None:
    prompter = RequestBuilder(load("demo"), 300)
    with pytest.raises(PromptTooLong, match="too many to be read for its end"):
        prompter.build(to_request("a " * 5000, max_tokens=5, truncate_prompt_tokens=10), lambda _: None, 0.0)


def test_of_a_prompt_that_is_too_long_beginning_and_end_are_read_on_request() -> None:
    prompter = RequestBuilder(load("demo"), 100)
    ids = [7 + i % 5 for i in range(500)]

    def read(ids: list[int] = ids, **options: Any) -> Sequence:
        marks = [end for end in (10, 100, 480) if end < len(ids)]
        asked = to_request(ids, max_tokens=30, segment_ends=marks, **options)
        return prompter.build(asked, lambda _: None, 0.0)

    both = read(truncate="middle")
    assert (both.tokens, both.request.max_tokens) == (ids[:35] + ids[-35:], 30), "with room for the answer"
    assert both.request.cache.marks.segment_ends == (10, 50)
    assert read(truncate="middle", truncate_prompt_tokens=5).tokens == ids[:2] + ids[-3:]
    assert read(truncate="middle", truncate_prompt_tokens=1).tokens == ids[-1:]
    assert read(truncate="left").tokens == ids[-70:]
    assert read(ids[:70], truncate="middle").tokens == ids[:70], "what fits is read whole"
    with pytest.raises(PromptTooLong, match="the prompt is too long: it has 500 tokens"):
        read()
    assert read(truncate="right").tokens == ids[:70]
    with pytest.raises(InvalidRequest, match="truncate is 'up'; allowed are left, middle, right"):
        read(truncate="up")
    asked = to_request(ids)
    asked.truncation = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="truncation is 9"):
        prompter.build(asked, lambda _: None, 0.0)


def test_a_repetition_penalty_makes_no_token_likelier() -> None:
    """Of a negative logit it takes something, too, instead of dividing it towards zero."""
    seen = SamplingState(SamplingParams(temperature=0.0, repetition_penalty=2.0), None, [1])
    assert one(seen, torch.tensor([-3.0, -2.0, -9.0])) == 0


def test_an_answer_does_not_end_before_min_tokens() -> None:
    sampler = SamplingState(SamplingParams(temperature=0.0, min_tokens=2), stops=[3])
    assert [one(sampler) for _ in range(3)] == [2, 2, 3]
