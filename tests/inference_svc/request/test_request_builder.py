"""Requests as the engine gets them: the model's own sampling, and prompts that are too long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.errors import InvalidRequest, PromptTooLong
from kvsidecar.inference.v1.inference_pb2 import GenerateRequest, Sampling, TokenizeRequest
from kvsidecar.requests import REST_OF_CONTEXT, to_prompt, to_request

from inference_svc.models.loader import DEMO_MODEL, load
from inference_svc.request.request_builder import RequestBuilder
from inference_svc.request.request_options import DEFAULT_MAX_TOKENS, stop_strings
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.sequence import Sequence


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


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"temperature": 0.25, "top_p": 0.9}, {"temperature": 0.25, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 3.0, "top_k": -1, "top_p": "high", "min_p": 0.05}, {"min_p": 0.05}),
    ],
    ids=["sampled", "greedy", "only a penalty", "without do_sample", "values that are not allowed"],
)
def test_what_is_recommended_is_the_default_where_it_is_allowed(
    tmp_path: Path, recommended: dict[str, Any], expected: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    stated = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(stated | recommended))
    prompter = RequestBuilder(load(str(folder)), 100)
    assert prompter.sampling(Sampling()) == SamplingParams(**expected)
    sent = Sampling(min_p=0.5, repetition_penalty=2.0)
    assert prompter.sampling(sent) == SamplingParams(**expected | {"min_p": 0.5, "repetition_penalty": 2.0})


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


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_a_prompt_that_fits_stays_whole_however_long_its_answer_may_be(side: str) -> None:
    """It lost the tokens in whose place the longest answer would be, and a long enough answer refused any prompt."""
    prompter = RequestBuilder(load("demo"), 300)

    def read(tokens: int, **options: Any) -> tuple[int, int]:
        built = prompter.build(to_request([7] * tokens, truncate=side, **options), lambda _: None, 0.0)
        return len(built.tokens), built.request.max_tokens

    assert [read(tokens, max_tokens=250) for tokens in (20, 100, 299)] == [(20, 250), (100, 200), (299, 1)]
    assert read(20, max_tokens=8192) == (20, 280)
    assert read(100, max_tokens=250, min_tokens=200) == (100, 200)
    assert read(300, max_tokens=250) == (50, 250), "it does not fit"
    assert read(101, max_tokens=250, min_tokens=200) == (50, 250)
    with pytest.raises(
        InvalidRequest, match="answer of 300 tokens; a context of 300 has none for the prompt"
    ) as caught:
        read(300, max_tokens=300)
    assert caught.value.param == "max_tokens"


def test_a_text_far_too_long_is_not_read_for_its_end() -> None:
    prompter = RequestBuilder(load("demo"), 300)
    with pytest.raises(PromptTooLong, match="too many to be read for its end"):
        prompter.build(to_request("a " * 5000, max_tokens=5, truncate_prompt_tokens=10), lambda _: None, 0.0)
    with pytest.raises(PromptTooLong, match="it has 9601 token ids; at most 9600 are read"):
        prompter.build(to_request([7] * 9601, max_tokens=5, truncate_prompt_tokens=10), lambda _: None, 0.0)


def test_the_token_ids_to_convert_are_limited() -> None:
    """16 million ids of one byte each, with their names, took gigabytes."""
    tokenizer = RequestBuilder(load("demo"), 300).tokenizer
    most = tokenizer.max_ids
    assert most == 1 << 17
    assert len(tokenizer.tokenize(TokenizeRequest(prompt=to_prompt([7] * most))).token_ids) == most
    with pytest.raises(PromptTooLong, match=f"it has {most + 1} token ids; at most {most} are read"):
        tokenizer.tokenize(TokenizeRequest(prompt=to_prompt([7] * (most + 1)), return_token_names=True))


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


def test_a_grammar_does_not_end_before_min_tokens_even_if_end_tokens_are_ignored() -> None:
    """A grammar is complete at an end token, so the answer ended there before ``min_tokens``."""
    loaded = load("demo")
    prompter = RequestBuilder(loaded, 100)

    def masked(**options: Any) -> set[int]:
        asked = to_request([7], max_tokens=30, min_tokens=12, stop_token_ids=[9], **options)
        return set(prompter.build(asked, lambda _: None, 0.0).sampling.too_early)

    assert masked(ignore_eos=True, regex="[a-z]{1,40}") == masked() == {9, *loaded.stop_tokens}
    assert masked(ignore_eos=True) == {9}


def test_a_stop_string_that_is_too_long_is_refused() -> None:
    """The search for its beginning takes time that grows with the square of its length."""
    assert stop_strings(GenerateRequest(stop=["a" * 1024])) == ("a" * 1024,)
    with pytest.raises(InvalidRequest, match="stop has a string of 5000 characters; at most 1024") as caught:
        stop_strings(GenerateRequest(stop=["b", "a" * 5000]))
    assert caught.value.param == "stop"


def test_a_separator_in_a_text_is_no_cut_between_two_short_parts() -> None:
    """With a space as the separator, almost every word was a chunk."""
    prompter = RequestBuilder(load("demo"), 1000)

    def ends(text: str) -> list[int]:
        asked = to_request(text, max_tokens=1, document_separator="#")
        found = prompter.build(asked, lambda _: None, 0.0)
        return [*found.request.cache.marks.segment_ends, len(found.tokens)]

    long = "the quick brown fox jumps over the lazy dog " * 3
    assert len(ends("a#b#" * 50)) == 1
    assert len(ends(f"{long}#b#{long}")) == 3
