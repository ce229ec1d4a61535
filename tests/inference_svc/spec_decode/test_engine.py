"""Guesses in the engine with a real model: the same answers, nothing of what was refused kept, no page lost."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvkernels.cpu import quantized_gemm
from kvsidecar.errors import ConfigurationError
from kvsidecar.inference.v1 import inference_pb2 as pb
from transformers import AutoTokenizer

from benchmarks.node import Node
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.draft_loader import load_draft
from inference_svc.models.loader import DEMO_MODEL, load
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence
from inference_svc.spec_decode.draft_model_proposer import DraftModelProposer
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER
from tests.inference_svc.server.test_load import Request, idle, submit_together
from tests.inference_svc.spec_decode.chance import free_rows

GRAMMARS = GrammarCompiler(TOKENIZER, 4096, END)
FIVE_NUMBERS = json.dumps({"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "minItems": 5, "maxItems": 5})


def engine_of(tokens: int, draft: bool = False, copy: bool = False, **limits: int) -> Engine:
    """An engine on which rows are free, so that all that may be guessed is."""
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, tokens, loaded.dtype, loaded.device)
    guessing = None
    if draft:
        twin = load("demo", dtype="float32")
        own = KVPool(twin.layers, twin.kv_heads, twin.head_dim, tokens, twin.dtype, twin.device)
        guessing = DraftModelProposer(Decoder(twin), own, int(loaded.config.vocab_size), twin.context_length, 512)
    if copy:
        low = Decoder(load("demo", dtype="float32", weights=4))
        guessing = DraftModelProposer(low, pool, int(loaded.config.vocab_size), loaded.context_length, 512, copy=True)
    engine = Engine(loaded, pool, NullKVConnector(), EngineLimits(**limits), draft=guessing)
    engine.speculator.costs = free_rows()
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = engine_of(8192)
    yield running
    idle(running)
    running.check_integrity()
    running.stop()


@pytest.fixture(scope="module")
def twins() -> Iterator[Engine]:
    """The draft is the model."""
    running = engine_of(8192, draft=True)
    yield running
    idle(running)
    running.check_integrity()
    assert not running._draft or not running._draft.tables()
    running.stop()


class Asked(Request):
    """A request with a chosen proposer of draft tokens."""

    def __init__(
        self,
        ids: list[int],
        length: int,
        speculation: SpeculationMode,
        *,
        stop: tuple[str, ...] = (),
        grammar: pb.Grammar | None = None,
        logprobs: int | None = None,
        **params: Any,
    ) -> None:
        super().__init__(ids, length)
        steering = None if grammar is None else GRAMMARS.compile(grammar)
        hidden = END if grammar else frozenset[int]()
        chosen = SamplingParams(**{"temperature": 0.0, **params})
        asked = GenerationRequest("r", len(ids), length, chosen, hidden, num_logprobs=logprobs, speculation=speculation)
        text = IncrementalDetokenizer(TOKENIZER, stop, hidden)
        self.sequence = Sequence(asked, list(ids), text, self._sink, steering)

    def whole(self) -> Any:
        """Return all results that the caller sees."""
        self.tokens()
        drawn = [o.token for o in self.outputs if o.token is not None]
        return drawn, "".join(o.text for o in self.outputs), self.outputs[-2 if len(drawn) < len(self.outputs) else -1]


def repetitive(seed: int) -> list[int]:
    """A prompt with something to look up."""
    part = prompt(seed, 24)
    return part + prompt(seed + 500, 6) + part


def mixed(speculation: SpeculationMode) -> list[Asked]:
    """Requests of all kinds; the same at every call."""
    out = []
    for i in range(24):
        ways: list[dict[str, Any]] = [
            {},
            {"temperature": 1.0, "seed": i, "top_p": 0.9},
            {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.1},
            {"logprobs": 3},
            {"stop": ("e",)},
            {"grammar": pb.Grammar(regex="([a-f]{2} ){12}end")},
            {"temperature": 0.7, "seed": i, "logprobs": 0, "logit_bias": {5: 3.0}},
            {"grammar": pb.Grammar(regex="(ab ){9,12}end"), "temperature": 1.0, "seed": i},
            {"grammar": pb.Grammar(json_schema=FIVE_NUMBERS), "temperature": 1.0, "seed": i, "logprobs": 1},
        ]
        out.append(Asked(repetitive(i), 20 + i, speculation, **ways[i % len(ways)]))
    return out


def ask(engine: Engine, requests: list[Asked]) -> list[Any]:
    submit_together(engine, requests)
    return [request.whole() for request in requests]


@pytest.mark.parametrize("speculation", [SpeculationMode.NGRAM, SpeculationMode.AUTO])
def test_answers_texts_and_chances_are_the_same(engine: Engine, speculation: SpeculationMode) -> None:
    want = ask(engine, mixed(SpeculationMode.OFF))
    before = engine.speculator.stats.accepted_tokens
    assert ask(engine, mixed(speculation)) == want
    assert engine.speculator.stats.accepted_tokens > before + 50
    half = [
        m if i % 2 else n for i, (m, n) in enumerate(zip(mixed(speculation), mixed(SpeculationMode.OFF), strict=True))
    ]
    assert ask(engine, half) == want, "beside those that guess nothing"


def test_a_draft_that_is_the_model_is_always_right(twins: Engine) -> None:
    plain = [one for one in mixed(SpeculationMode.OFF) if one.sequence.grammar is None]
    guessed = [one for one in mixed(SpeculationMode.DRAFT) if one.sequence.grammar is None]
    want = ask(twins, plain)
    assert ask(twins, guessed) == want
    stats = twins.speculator.stats
    ended_early = [one for one in guessed if any(o.finish is FinishReason.STOP for o in one.outputs)]
    refused = sum(
        s.sequence.speculation.num_draft_tokens - s.sequence.speculation.num_accepted_tokens
        for s in guessed
        if s not in ended_early
    )
    assert stats.draft_tokens > 300
    assert refused == 0


def test_also_beside_prompts_and_under_grammars(twins: Engine) -> None:
    want = ask(twins, mixed(SpeculationMode.OFF))
    first = mixed(SpeculationMode.AUTO)
    for request in first[:12]:
        twins.submit(request.sequence)
    while not first[11].outputs:
        time.sleep(0.001)
    for request in first[12:]:
        twins.submit(request.sequence)
    assert [request.whole() for request in first] == want


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_greedy_answers_are_the_same(twins: Engine) -> None:
    def asked(speculation: SpeculationMode) -> list[Asked]:
        return [Asked(repetitive(i), 24, speculation) for i in range(1000)]

    want = ask(twins, asked(SpeculationMode.OFF))
    assert ask(twins, asked(SpeculationMode.NGRAM)) == want
    assert ask(twins, asked(SpeculationMode.AUTO)) == want


@pytest.mark.skipif(quantized_gemm.kernel() is None, reason="this CPU multiplies no weights of 4 bits")
def test_a_copy_at_four_bits_guesses_from_the_models_own_keys() -> None:
    engine = engine_of(8192, copy=True)
    want = ask(engine, mixed(SpeculationMode.OFF))
    assert ask(engine, mixed(SpeculationMode.DRAFT)) == want
    stats = engine.speculator.stats
    assert stats.draft_tokens > stats.accepted_tokens > 100
    idle(engine)
    engine.check_integrity()
    engine.stop()


def test_preempted_and_cancelled_requests_leave_no_page() -> None:
    requests = [Asked(repetitive(i), 130, SpeculationMode.OFF, seed=i, temperature=i % 2) for i in range(6)]
    large = engine_of(4096)
    want = ask(large, requests)
    large.stop()
    small = engine_of(352, draft=True)
    modes = [SpeculationMode.NGRAM, SpeculationMode.DRAFT, SpeculationMode.AUTO]
    again = [Asked(repetitive(i), 130, modes[i % 3], seed=i, temperature=i % 2) for i in range(6)]
    chance = random.Random(3)
    assert ask(small, again) == want
    assert small.stats.preemptions > 0
    for i in range(15):
        request = Asked(repetitive(100 + i), 60, modes[i % 3], seed=i, temperature=i % 2)
        small.submit(request.sequence)
        while not request.outputs:
            time.sleep(0.0005)
        for _ in range(chance.randrange(4)):
            time.sleep(0.001)
        small.cancel(request.sequence)
        assert request.ended.wait(60)
    idle(small)
    small.check_integrity()
    assert small.free_pages == small.pool.pages
    assert small._draft is not None
    assert not small._draft.tables()
    assert not small.speculator._own
    small.stop()


def test_a_proposer_that_fails_is_off_and_answers_go_on(twins: Engine) -> None:
    broken = engine_of(2048, draft=True)

    def fail(requests: Any) -> Any:
        raise RuntimeError("planted")

    assert broken._draft is not None
    broken._draft.propose = fail  # type: ignore[method-assign]
    want = ask(broken, [Asked(repetitive(1), 30, SpeculationMode.OFF)])
    assert ask(broken, [Asked(repetitive(1), 30, SpeculationMode.AUTO)]) == want
    assert SpeculationMode.DRAFT not in broken.speculator._proposers
    broken.stop()


def test_a_draft_with_other_tokens_is_refused() -> None:
    loaded = load("demo")
    other = AutoTokenizer.from_pretrained(DEMO_MODEL)
    other.add_tokens(["something new"])
    with pytest.raises(ConfigurationError, match="whose tokenizer differs from that of demo in 1 tokens"):
        load_draft("demo", "demo", replace(loaded, tokenizer=other), strict=True)


def test_nothing_refused_is_ever_stored() -> None:
    """What was guessed wrongly lay behind the answer's end: whoever goes on from it, out of the pool or after the
    worker's death, has the logits of who computes it all."""
    flags = {"speculate": "ngram", "dtype": "float32"}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        ids, answers = repetitive(9), []
        for turn in range(20):
            answer = node.client().generate(ids, max_tokens=40, temperature=0, ignore_eos=True)
            ids = ids + answer.token_ids + prompt(700 + turn, 10)
            answers.append(answer)
            node.settle()  # until an answer is stored, only its prompt is shared
            accepted, drafted = (sum(getattr(a, f"{kind}_tokens") for a in answers) for kind in ("accepted", "draft"))
            if turn > 1 and 0 < accepted < drafted:  # what a busy machine measures leaves guesses to later turns
                break
        assert 0 < accepted < drafted
        assert answers[-1].cached_tokens >= len(ids) - 64
        stats = node.client().stats()
        assert stats.accepted_tokens == accepted
        assert stats.accepted_at[0] <= stats.drafts
        seen = [node.client().generate(ids, max_tokens=2, temperature=0, logprobs=20)]
        node.restart_worker(0)
        seen.append(node.client().generate(ids, max_tokens=2, temperature=0, logprobs=20))
        want = node.client().generate(ids, max_tokens=2, temperature=0, logprobs=20, skip_cache=True, speculation="off")
        assert [s.cached_tokens >= len(ids) - 64 for s in seen] == [True, True]
        assert [list(s.logprobs) for s in seen] == [list(want.logprobs)] * 2
