"""Branches of guesses: rows with the bits of who computes one branch alone, and answers that go on in any of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_events import CancelRequested, RequestSubmitted
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_graph, forward_batch
from inference_svc.model_runner.cuda_attention import CudaAttention
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import LoadedModel, load
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.branch_tables import BranchTables
from inference_svc.spec_decode.draft_budget import DraftNode, StepCosts, select_drafts
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest
from inference_svc.spec_decode.speculator import Speculator
from tests.inference_svc.models.test_architectures import build
from tests.inference_svc.server.test_load import idle
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
from tests.inference_svc.spec_decode.test_draft_budget import cycle
from tests.inference_svc.spec_decode.test_engine import Asked, ask, mixed
from tests.inference_svc.windowed import ALL, SOME, Windowed, windowed
from tests.inference_svc.windowed import prompt as words
from tests.kvkernels.emulated.conftest import library

# Beside the first: a longer one from the root on, one that begins further on, and one that leaves the second.
TREE = Draft((3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13), (ROOT, 0, 1, ROOT, 3, 1, 4, 6, 7, 5, 4), (0,) * 11)

# ---- rows -----------------------------------------------------------------------------------------------------------


def decoder_of(name: str, dtype: torch.dtype) -> tuple[LoadedModel, Decoder]:
    loaded, _, _ = build(name, dtype, **({"sliding_window": 40} if name == ALL else {}))
    return loaded, Decoder(loaded)


def pool_of(loaded: LoadedModel) -> KVPool:
    shape = loaded.layers, loaded.kv_heads, loaded.head_dim
    return KVPool(*shape, 2048, loaded.dtype, loaded.device, loaded.windows)


def read(decoder: Decoder, pool: KVPool, ids: list[int], pieces: bool) -> Sequence:
    """A sequence of which all but the last token is computed; with ``pieces`` its pages lie apart."""
    reading, table = sequence(ids, 50), pool.allocate(PAGE_TOKENS)
    assert table is not None
    reading.kv.table, reading.kv.num_computed = table, len(ids) - 1
    for end in range(PAGE_TOKENS, len(ids) + 2 * PAGE_TOKENS, PAGE_TOKENS):
        between = pool.allocate(1) if pieces else None
        assert pool.grow(table, end)
        if between:
            pool.free(between)
    decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids[:-1], 0, table, True)], pool, pool.keys.device))
    return reading


def verify(
    decoder: Decoder, pool: KVPool, reading: Sequence, tree: Draft, forks: BranchTables
) -> tuple[forward_batch.SequenceSlice, Tensor]:
    """The logits of the last token's row, and of those of the tree."""
    first, *_ = tree.paths()
    tokens = [reading.tokens[-1], *(tree.tokens[i] for i in first)]
    assert reading.kv.table is not None
    span = forward_batch.SequenceSlice(tokens, len(reading.tokens) - 1, reading.kv.table, True, num_drafted=len(first))
    span = replace(span, branches=forks.fork(reading, tree))
    return span, decoder(forward_batch.build_batch([span], pool, pool.keys.device))


CASES = [
    ("LlamaForCausalLM", torch.bfloat16),
    ("Qwen3ForCausalLM", torch.float32),
    (ALL, torch.bfloat16),
    (SOME, torch.float32),
]


@pytest.mark.parametrize("chains", [True, False], ids=["chained", "plain"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_row_has_the_same_bits_with_any_branches_beside_it(
    name: str, dtype: torch.dtype, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any place of a page, in one piece or several, with a window or none; what is adopted, too."""
    if not chains:
        monkeypatch.setattr(cpu_graph, "can_capture", lambda batch, heads: False)
    loaded, decoder = decoder_of(name, dtype)
    for length in (2, 30, 31, 32, 33, 61, 64, 100):
        ids, pool = words(length, length), pool_of(loaded)
        reading = read(decoder, pool, ids, pieces=length % 2 == 0)
        forks = BranchTables(pool, pool.grow)
        span, got = verify(decoder, pool, reading, TREE, forks)
        assert len(span.branches) == 3
        for leaf in (2, 8, 9, 10):
            places = [*TREE.ancestors(leaf)[1:], leaf]
            alone = Draft.chain([TREE.tokens[i] for i in places], [0] * len(places))
            another = pool_of(loaded)
            chain = read(decoder, another, ids, pieces=False)
            _, want = verify(decoder, another, chain, alone, BranchTables(another, another.grow))
            way, at = [0], 0
            for i in places:
                at = span.following(at)[TREE.tokens[i]]
                way.append(at)
                branch = span.branch_of(at)
                if branch is not None:
                    forks.commit_row(reading, branch, at)
            assert torch.equal(got[way], want)
            assert reading.kv.table is not None
            assert chain.kv.table is not None
            end = length + len(places)
            here, there = (torch.from_numpy(t.slots(length - 1, end)) for t in (reading.kv.table, chain.kv.table))
            for mine, theirs in ((pool.keys, another.keys), (pool.values, another.values)):
                assert torch.equal(mine[:, :, here], theirs[:, :, there])
            decoder(forward_batch.build_batch([span], pool, pool.keys.device))  # as it was, for the next one
        forks.free()
        pool.free(reading.kv.table)
        pool.check_integrity()
        assert pool.free_pages == pool.pages


def test_branches_on_a_gpu_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our CUDA kernels, run by the emulator: the logits of each branch are those of a chain."""
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    loaded, _, _ = build("LlamaForCausalLM", torch.bfloat16, head_dim=64)
    decoder, ids = Decoder(loaded), words(1, 45)
    pool = pool_of(loaded)
    pool.native = CudaAttention(library())
    span, got = verify(decoder, pool, read(decoder, pool, ids, False), TREE, BranchTables(pool, pool.grow))
    for leaf in (2, 8, 9, 10):
        places, way, at = [*TREE.ancestors(leaf)[1:], leaf], [0], 0
        for i in places:
            at = span.following(at)[TREE.tokens[i]]
            way.append(at)
        another = pool_of(loaded)
        chain = Draft.chain([TREE.tokens[i] for i in places], [0] * len(places))
        _, want = verify(
            decoder, another, read(decoder, another, ids, False), chain, BranchTables(another, another.grow)
        )
        assert (got[way].float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()


def test_where_there_is_no_page_there_is_no_branch() -> None:
    loaded, decoder = decoder_of("LlamaForCausalLM", torch.float32)
    pool = pool_of(loaded)
    reading = read(decoder, pool, words(1, 40), pieces=False)
    left = pool.allocate((pool.free_pages - 2) * PAGE_TOKENS)
    assert left is not None
    forks = BranchTables(pool, pool.grow)
    assert len(forks.fork(reading, TREE)) == 2, "a page for each, and then none"
    forks.free()
    taken = pool.allocate(2 * PAGE_TOKENS)
    assert taken is not None
    assert forks.fork(reading, TREE) == ()
    assert forks.tables == []


# ---- what is worth its rows -----------------------------------------------------------------------------------------


def test_a_branch_is_taken_where_it_is_worth_more_than_its_rows() -> None:
    chain = [DraftNode(0.5**i, 0, i - 1, i - 2) for i in range(1, 4)]

    def chosen(chance: float, by_row: float, branch: float) -> list[int]:
        prices = StepCosts(lambda more: 1 + by_row * -(-(1 + more) // 4) * 4, branch, 1)
        return [n.place for n in select_drafts([*chain, DraftNode(chance, 0, 9, ROOT)], [2], prices).nodes]

    assert 9 in chosen(0.3, 0.0, 0.0), "rows cost nothing"
    assert 9 not in chosen(0.3, 0.0, 0.5), "its pages take as long as half a pass"
    assert 9 not in chosen(0.02, 0.1, 0.0), "it is hardly ever right"
    assert 9 in chosen(0.3, 0.01, 0.001)
    prices = StepCosts(lambda more: 1.0, 0.0, 1)
    assert 9 not in [n.place for n in select_drafts([*chain, DraftNode(0.3, 0, 9, ROOT)], [1], prices).nodes], (
        "chains alone"
    )


# ---- answers --------------------------------------------------------------------------------------------------------


class Misled:
    """Proposer whose first branch is wrong and whose second branch is right, for an answer that is a cycle."""

    step_seconds, priors = 0.0, (0.5, 0.5)

    def __init__(self, right: int = 1) -> None:
        self._right, self.accepted = right, list[tuple[int, int]]()

    def propose(self, requests: Any) -> list[Draft]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> Draft:
        last = request.sequence.tokens[-1]
        wrong = [(last + 3 + i) % VOCABULARY for i in range(request.max_tokens)]
        if request.max_branches == 1:
            return Draft.chain(wrong, [0] * len(wrong))
        right = [(last + 1 + i) % VOCABULARY for i in range(request.max_tokens)]
        parents = [*range(ROOT, request.max_tokens - 1), ROOT, *range(request.max_tokens, 2 * request.max_tokens - 1)]
        return Draft((*wrong, *right), tuple(parents), (0,) * request.max_tokens + (1,) * request.max_tokens)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self.accepted.append((drafted, accepted))

    def finish(self, sequence: Sequence) -> None: ...
    def forget(self, sequence: Sequence) -> None: ...


def test_where_the_second_branch_is_right_answers_take_fewer_passes() -> None:
    passes = dict[int, int]()
    for branches in (1, 2):
        model, proposer = cycle(), Misled()
        loop = loop_of(model, {SpeculationMode.NGRAM: proposer}, branches=branches)
        (answer,) = answers(loop, [sequence([0, 1, 2], 200, temperature=0.0)])
        assert answer == [(3 + i) % VOCABULARY for i in range(200)]
        passes[branches] = model.passes
        stats = loop._speculator.stats
        assert (stats.accepted_tokens > 150) is (branches == 2)
        assert proposer.accepted
        assert all(accepted == 0 for _, accepted in proposer.accepted), "nothing of the first path was right"
    assert passes[2] < 40 < 150 < passes[1]


class Recited(Table):
    """Proposer of one fixed text."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(torch.empty(0))
        self._text = torch.tensor(text)

    def __call__(self, batch: forward_batch.ForwardBatch) -> Tensor:
        self.passes += 1
        following = self._text[batch.positions[batch.logit_rows[: batch.wanted]] + 1]
        return torch.nn.functional.one_hot(following, VOCABULARY) * 50.0


def test_a_text_that_goes_on_in_two_ways_is_followed_on_both() -> None:
    """Real look-ups: behind 0 1 comes 2 or 3, and what came the last time says nothing of which."""
    chance = random.Random(5)
    text = [token for _ in range(120) for token in (0, 1, chance.choice((2, 3)), 4)]
    passes = dict[int, int]()
    for branches in (1, 2):
        model = Recited(text)
        loop = loop_of(model, branches=branches)
        (answer,) = answers(loop, [sequence(text[:160], 300, temperature=0.0)])
        assert answer == text[160:460]
        assert (loop._speculator.stats.branched_tokens > 30) is (branches == 2)
        passes[branches] = model.passes
    assert passes[2] < 0.8 * passes[1]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 8192, loaded.dtype, loaded.device)
    running = Engine(loaded, pool, NullKVConnector(), EngineLimits(num_speculative_branches=4))
    running.speculator.costs = free_rows()
    yield running
    idle(running)
    running.check_integrity()
    running.stop()


def test_answers_texts_and_chances_are_the_same(engine: Engine) -> None:
    want = ask(engine, mixed(SpeculationMode.OFF))
    assert ask(engine, mixed(SpeculationMode.NGRAM)) == want
    stats = engine.speculator.stats
    assert stats.branches > 20
    assert stats.branched_tokens > 5


class Knowing(Misled):
    """Proposer that knows the answer. Its first branch becomes wrong after some tokens; other branches stay right."""

    priors = (0.9, 0.9)

    def __init__(self, answer: list[int]) -> None:
        super().__init__()
        self._answer = answer

    def _guess(self, request: DraftRequest) -> Draft:
        done = request.sequence.num_generated
        right, at = self._answer[done : done + request.max_tokens], done % 3
        if len(right) < 4:
            return Draft()
        tokens = [*right[:at], 1, 2, *right[at:-1], 3, right[-1]]
        parents = [*range(ROOT, at + 1), at - 1, *range(at + 2, len(right)), len(right), len(right)]
        return Draft(tuple(tokens), tuple(parents), (0,) * len(tokens))


@pytest.mark.parametrize("name", [ALL, SOME, "LlamaForCausalLM"])
def test_windows_and_contexts_beyond_the_pool_have_branches_too(name: str, tmp_path: Path) -> None:
    overflow = (tmp_path, 2048) if name == "LlamaForCausalLM" else None
    ids = words(1, 700)

    def answer(tokens: int, overflow: tuple[Path, int] | None, want: list[int]) -> tuple[list[int], Windowed]:
        made = windowed(name, tokens, dtype=torch.bfloat16, overflow=overflow)
        guessing = Speculator({SpeculationMode.NGRAM: Knowing(want)}, free_rows(), 8, 3)
        core = made.engine._core
        made.engine.speculator = core._speculator = core._sampler._speculator = guessing
        core._builder._services = replace(core._builder._services, speculator=guessing)
        request = Asked(ids, 100, SpeculationMode.NGRAM if want else SpeculationMode.OFF)
        made.engine.submit(request.sequence)
        found = request.tokens()
        idle(made.engine)
        made.engine.check_integrity()
        made.close()
        return found, made

    want, _ = answer(8192, None, [])
    got, made = answer(512 if overflow else 8192, overflow, want)
    assert got == want
    assert made.engine.stats.overflow_admissions == (1 if overflow else 0)
    stats = made.engine.speculator.stats
    assert stats.branched_tokens > 40
    assert stats.accepted_tokens > 80


def test_200_requests_of_which_a_third_are_cancelled_leave_no_page() -> None:
    """In a pool so small that some are preempted, too, and branches find no page."""
    chance, model = random.Random(1), table(3)
    loop = loop_of(model, branches=3)
    loop.pool = loop._builder._pool  # one and the same
    while loop.pool.free_pages > 24:
        assert loop.pool.allocate(PAGE_TOKENS) is not None
    waiting = [sequence(prompt(i, chance.randrange(2, 90)), chance.randrange(1, 60), seed=i) for i in range(200)]
    asked = list(waiting)
    cancelled = {id(one) for i, one in enumerate(asked) if i % 3 == 0}
    while waiting or loop.busy:
        for one in [waiting.pop() for _ in range(min(len(waiting), 4))]:
            loop.handle(RequestSubmitted(one))
        loop.step()
        assert loop._builder.branch_tables.tables == []
        for one in [s for s in loop.running if id(s) in cancelled and s.num_generated > 3]:
            one.cancelled.set()
            loop.handle(CancelRequested(one))
    assert loop._speculator.stats.branches > 100
    assert loop._stats.cancelled > 30
    assert loop._stats.preemptions > 0
    while loop.prefix_cache.evict():
        pass
    assert loop.pool.free_pages == 24
    loop.pool.check_integrity()


def test_a_failing_forward_gives_branches_back_and_goes_on() -> None:
    class Broken(Table):
        def __call__(self, batch: forward_batch.ForwardBatch) -> Tensor:
            if batch.copies is not None:
                raise RuntimeError("planted")
            return super().__call__(batch)

    model = Broken(cycle().logits)
    loop = loop_of(model, {SpeculationMode.NGRAM: Misled()}, branches=2)
    (answer,) = answers(loop, [sequence([0, 1, 2], 20, temperature=0.0)])
    assert answer == [(3 + i) % VOCABULARY for i in range(20)]
    assert loop._builder.branch_tables.tables == []
    loop.pool.check_integrity()


def test_what_is_not_finite_in_branches_is_cleared_and_the_answer_goes_on() -> None:
    """NaN in a page would spread to whoever gets it next."""

    class Spoiling(Table):
        def __call__(self, batch: forward_batch.ForwardBatch) -> Tensor:
            out = super().__call__(batch)
            if batch.copies is None:
                return out
            for tensor in (batch.pool.keys, batch.pool.values):
                tensor[:, :, batch.copies.flat[1]] = float("nan")
            return torch.full_like(out, float("nan"))

    loop = loop_of(Spoiling(cycle().logits), {SpeculationMode.NGRAM: Misled()}, branches=2)
    (answer,) = answers(loop, [sequence([0, 1, 2], 20, temperature=0.0)])
    assert answer == [(3 + i) % VOCABULARY for i in range(20)]
    while loop.prefix_cache.evict():
        pass
    assert loop.pool.keys.isfinite().all()
    assert loop.pool.values.isfinite().all()
    assert loop.pool.free_pages == loop.pool.pages
