"""Answers kept to a grammar inside the engine: beside others, through preemption, and when the grammar itself fails."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kvsidecar.errors import GenerationFailed, GrammarFailed, InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import MAX_GRAMMAR_BYTES
from llguidance import LLMatcher, LLParserLimits, hf

from inference_svc.sampling.logprobs import SampledToken
from inference_svc.sampling.sampler import sample
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sampling.sampling_state import SamplingState
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest
from inference_svc.sequence.sequence import FinishReason, Sequence
from inference_svc.structured_output import grammar_compiler
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER
from tests.inference_svc.server.test_load import Request, idle, small_engine, submit_together

GRAMMARS = GrammarCompiler(TOKENIZER, 4096, END)
# A first token exists, but finding it exceeds the matcher's limits.
DIFFERENCE = "start: T\nT: /(?s:.*)/ & ~/(?s:.*)(foo|bar.{0,20}baz)(?s:.*)/"
TOO_COMPLEX = "too complex: too many expressions constructed; send a simpler one$"
DIGITS = pb.Grammar(regex="([a-f0-9]{4} ){12,16}end")


class Steered(Request):
    """A request whose answer follows a grammar."""

    def __init__(self, ids: list[int], length: int, grammar: GrammarState, seed: int | None = None) -> None:
        super().__init__(ids, length, seed)
        params = self.sequence.request.sampling_params
        text = IncrementalDetokenizer(TOKENIZER, (), END)
        self.sequence = Sequence(
            GenerationRequest("r", len(ids), length, params, END), list(ids), text, self._sink, grammar
        )

    def text(self) -> str:
        self.tokens()
        return "".join(output.text for output in self.outputs)


def test_preempted_answers_go_on_where_their_grammar_was() -> None:
    prompts = [prompt(i, 60) for i in range(6)]
    want = []
    large = small_engine(4096)
    for i, ids in enumerate(prompts):
        request = Steered(ids, 150, GRAMMARS.compile(DIGITS), seed=i if i % 2 else None)
        large.submit(request.sequence)
        want.append(request.text())
    large.stop()
    small = small_engine(400)
    requests = [Steered(ids, 150, GRAMMARS.compile(DIGITS), seed=i if i % 2 else None) for i, ids in enumerate(prompts)]
    submit_together(small, requests)
    assert [request.text() for request in requests] == want
    assert small.stats.preemptions > 0
    idle(small)
    small.check_integrity()
    small.stop()
    assert all(re.fullmatch(DIGITS.regex, text) for text in want)


def test_a_grammar_that_fails_fails_its_sequence_alone() -> None:
    engine = small_engine(4096)
    plain = [Request(prompt(i, 30), 12, seed=i) for i in range(3)]
    for request in plain:
        engine.submit(request.sequence)
    want = [request.tokens() for request in plain]
    with ThreadPoolExecutor(1) as threads:
        tokenizer = hf.from_tokenizer(TOKENIZER, 4097)
        source = LLMatcher.grammar_from_regex("(.*a.{40}){9}")
        limits = LLParserLimits(step_lexer_fuel=2, precompute_large_lexemes=False)
        bad = Steered(
            prompt(9, 30), 12, GrammarState(LLMatcher(tokenizer, source, log_level=0, limits=limits), threads)
        )
        engine.submit(bad.sequence)
        beside = [Request(prompt(i, 30), 12, seed=i) for i in range(3)]
        for request in beside:
            engine.submit(request.sequence)
        assert bad.ended.wait(60)
        assert bad.outputs[-1].finish is FinishReason.FAILED
        assert isinstance(bad.outputs[-1].error, GenerationFailed)
        assert "the grammar could not be kept to" in str(bad.outputs[-1].error)
        assert [request.tokens() for request in beside] == want
    idle(engine)
    engine.check_integrity()
    engine.stop()


def test_masks_touch_no_other_row() -> None:
    logits = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    digit = GRAMMARS.compile(pb.Grammar(regex="[0-9]{3}"))
    both = [SamplingState(SamplingParams(temperature=0.0), 3, (), s) for s in (None, digit, None)]
    drawn = sample(logits, [*both, SamplingState(SamplingParams(seed=1))])
    alone = sample(logits[[0, 2]], [both[0], both[2]])
    assert [drawn[0], drawn[2]] == alone
    steered = drawn[1]
    assert isinstance(steered, SampledToken)
    assert TOKENIZER.decode([steered.token]).isdigit()
    assert all(TOKENIZER.decode([token]).isdigit() for token, _ in steered.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_tokens_that_the_grammar_excludes_are_a_fault_of_the_request(temperature: float) -> None:
    logits = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    letters = frozenset(TOKENIZER("ab", add_special_tokens=False)["input_ids"])
    params = SamplingParams(temperature=temperature, allowed_tokens=letters)
    (found,) = sample(logits, [SamplingState(params, grammar=GRAMMARS.compile(pb.Grammar(regex="[0-9]{3}")))])
    assert isinstance(found, GrammarFailed)
    assert found.param == "allowed_token_ids"
    assert "allowed_token_ids has no token that the grammar allows" in str(found)


def test_a_mask_is_there_when_it_is_asked_for_and_computed_once() -> None:
    """On its own thread, while whoever asked does something else."""
    began, go_on = threading.Event(), threading.Event()

    class Slow(ThreadPoolExecutor):
        submitted = 0

        def submit(self, work: Any, /, *args: Any, **named: Any) -> Any:
            self.submitted += 1

            def run() -> Any:
                began.set()
                assert go_on.wait(30)
                return work()

            return super().submit(run)

    with Slow(1) as threads:
        grammar = GrammarState(LLMatcher(hf.from_tokenizer(TOKENIZER, 4097), 'start: "ab"'), threads)
        grammar.start_mask()
        assert began.wait(30)
        go_on.set()
        first = grammar.mask()
        grammar.start_mask()
        assert np.array_equal(first, grammar.mask())
        assert threads.submitted == 1


def test_a_panic_in_the_compiled_code_is_the_answers_own_failure() -> None:
    class Panic(BaseException):
        pass

    class Panicking(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **named: Any) -> Any:
            def panic() -> None:
                raise Panic

            return super().submit(panic)

    with Panicking(1) as threads:
        grammar = GrammarState(LLMatcher(hf.from_tokenizer(TOKENIZER, 4097), 'start: "ab"'), threads)
        with pytest.raises(GenerationFailed, match="Panic"):
            grammar.mask()


def test_an_answer_is_complete_only_when_nothing_may_follow() -> None:
    grammar = GRAMMARS.compile(pb.Grammar(regex="ab?"))
    (a,), (b,) = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in "ab")
    grammar.accept(a)
    assert not grammar.complete, "it may end here, and may go on"
    assert set(np.flatnonzero(np.unpackbits(grammar.mask(), bitorder="little"))) == {b, *END}
    grammar.accept(b)
    assert grammar.complete
    other = GRAMMARS.compile(pb.Grammar(regex="ab?"))
    with pytest.raises(GenerationFailed, match="the grammar could not be kept to"):
        other.accept(b)


def test_the_same_grammar_is_compiled_once_and_shares_no_state() -> None:
    one, other = (GRAMMARS.compile(pb.Grammar(choice=pb.Choices(texts=["xy", "xz"]))) for _ in range(2))
    before = other.mask().copy()
    one.accept(TOKENIZER("x", add_special_tokens=False)["input_ids"][0])
    assert np.array_equal(other.mask(), before)
    assert not np.array_equal(one.mask(), before)


def test_a_grammar_whose_matcher_failed_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share their lexer, which fails in all copies when one copy exceeds a limit."""
    monkeypatch.setattr(grammar_compiler, "LLParserLimits", partial(LLParserLimits, max_lexer_states=2000))
    grammars, grammar = GrammarCompiler(TOKENIZER, 4096, END), pb.Grammar(regex="(.*a.{40}){9}")
    letters = TOKENIZER("ab", add_special_tokens=False)["input_ids"]

    chance = random.Random(0)

    def answers() -> None:
        for _ in range(100):
            state = grammars.compile(grammar)
            for _ in range(60):
                state.accept(chance.choice(letters))

    with pytest.raises(GrammarFailed):
        answers()
    assert grammars.compile(grammar).mask().any()


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (pb.Grammar(), "the grammar is empty"),
        (pb.Grammar(json_schema="[]"), "must be an object"),
        (pb.Grammar(json_schema='{"a": ' * 3000), "the JSON schema is not JSON|recursion"),
        (pb.Grammar(json_schema='{"$ref": "http://elsewhere/x"}'), "the keyword '.ref' names 'http://elsewhere/x'"),
        (pb.Grammar(json_schema='{"$ref": "#"}'), "no text begins as it says, .* refers only to itself$"),
        (pb.Grammar(json_schema='{"type": "string", "format": "iri"}'), "Unknown format: iri; leave the keyword"),
        (pb.Grammar(json_schema='{"uniqueItems": true}'), "the JSON schema keyword 'uniqueItems' is not supported"),
        (pb.Grammar(json_schema='{"contains": {}, "if": {}}'), "keywords 'contains', 'if' are not supported"),
        (pb.Grammar(json_schema='{"not": {}}'), "the JSON schema keyword 'not' is not supported; leave it out"),
        (pb.Grammar(json_schema='{"pattern": "a(?=b)"}'), "the keyword 'pattern' has .* not supported: look-around"),
        (pb.Grammar(json_schema='{"patternProperties": {"(?!a)": {}}}'), "the keyword 'patternProperties' has .*"),
        (pb.Grammar(json_schema='{"type": {"type": "null"}}'), "the keyword 'type' must be a string or array"),
        (pb.Grammar(json_schema=json.dumps({"enum": ["x" * MAX_GRAMMAR_BYTES]})), "at most 65536 are allowed"),
        (pb.Grammar(regex="a(?=b)"), "look-around"),
        (pb.Grammar(regex="a{1000}{1000}"), TOO_COMPLEX),
        (pb.Grammar(grammar=DIFFERENCE), TOO_COMPLEX),
        (pb.Grammar(choice=pb.Choices(texts=["a", ""])), "none that is empty"),
        (pb.Grammar(choice=pb.Choices(texts=["a"] * 2000)), "at most 1024"),
        (pb.Grammar(regex="a", json_whitespace=" "), "json_whitespace is for a json_schema"),
        (
            pb.Grammar(
                json_schema=json.dumps(
                    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "string"}},
                     "required": [f"p{i}{j}"]} for j in range(4)]} for i in range(7)]}
                )
            ),
            "schema too large",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_says_why_in_a_line(grammar: pb.Grammar, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        GRAMMARS.compile(grammar)
    assert caught.value.param == "grammar"
    assert "\n" not in str(caught.value)


def test_a_long_chain_of_rules_does_not_end_the_process() -> None:
    """The compiler recurses along the chain; on a usual stack, 3,000 rules were a segmentation fault."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(5000))
    assert not GRAMMARS.compile(pb.Grammar(grammar=f'start: r0\n{rules}r5000: "a"\n')).complete
