"""Adapters in the engine, with a real model: in one batch with the model and with cancelled requests, guessed for,
preempted and repaired, each answer is the one that it gets alone; nothing of one is reused by another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kvkernels.cpu import quantized_gemm

from inference_svc.context_reuse.reuse_plan import RelocatedSpan, ReusePlan
from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CacheScope
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import load
from inference_svc.sequence.generation_request import CacheParams, SpeculationMode
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason
from inference_svc.spec_decode.draft_model_proposer import DraftModelProposer
from inference_svc.spec_decode.ngram_proposer import AnswerHistory
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.lora.random_adapters import adapter, linears, tensors, write
from tests.inference_svc.server.test_load import Request, idle
from tests.inference_svc.spec_decode.chance import free_rows

NAMES = ("", "a", "b")
SOME = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def engine_of(tokens: int, at: Path, *, copy: bool = False, **limits: int) -> Engine:
    """An engine with two adapters, on which rows are free, so that all that may be guessed is."""
    loaded = load("demo", dtype="float32")
    layers = linears(loaded)
    folders = [write(at / "a", tensors(layers, 1)), write(at / "b", tensors(layers, 2, SOME))]
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, tokens, loaded.dtype, loaded.device)
    draft = None
    if copy:
        low = Decoder(load("demo", dtype="float32", weights=4))
        draft = DraftModelProposer(low, pool, int(loaded.config.vocab_size), loaded.context_length, 512, copy=True)
    weights = [adapter(folder, loaded, folder.name) for folder in folders]
    engine = Engine(loaded, pool, NullKVConnector(), EngineLimits(**limits), draft=draft, adapters=weights)
    engine.speculator.costs = free_rows()
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    running = engine_of(8192, tmp_path_factory.mktemp("adapters"))
    yield running
    idle(running)
    running.check_integrity()
    running.stop()


def ask(
    engine: Engine,
    name: str,
    ids: list[int],
    length: int = 16,
    *,
    seed: int | None = None,
    keep: bool = False,
    guessed: SpeculationMode = SpeculationMode.OFF,
) -> Request:
    request = Request(ids, length, seed)
    request.sequence.request = replace(request.sequence.request, adapter=engine.adapters[name] if name else None)
    request.sequence.request = replace(request.sequence.request, cache=CacheParams(read=keep, write=keep))
    request.sequence.speculation.mode = guessed
    engine.submit(request.sequence)
    return request


def test_each_in_a_batch_is_as_alone_and_cancelling_some_changes_nothing(engine: Engine) -> None:
    asked = [(NAMES[i % 3], prompt(i // 3, 30 + 7 * (i % 5)), i if i % 2 else None) for i in range(12)]
    alone = [ask(engine, name, ids, seed=seed).tokens() for name, ids, seed in asked]
    assert len({tuple(ask(engine, name, prompt(0, 40), seed=1).tokens()) for name in NAMES}) == 3
    together = [ask(engine, name, ids, seed=seed) for name, ids, seed in asked]
    others = [ask(engine, NAMES[i % 3], prompt(90 + i, 200), 400) for i in range(6)]
    for other in others:
        engine.cancel(other.sequence)
    assert [request.tokens() for request in together] == alone
    assert all(o.ended.wait(10) and o.outputs[-1].finish is FinishReason.CANCELLED for o in others)


def test_what_one_has_read_no_other_reuses(engine: Engine) -> None:
    ids = prompt(7, 200)
    want = {name: ask(engine, name, ids).tokens() for name in NAMES}
    first = {name: ask(engine, name, ids, keep=True) for name in NAMES}  # together: none waits for another's
    assert {name: request.tokens() for name, request in first.items()} == want
    assert [request.sequence.usage.num_cached for request in first.values()] == [0, 0, 0]
    idle(engine)
    again = {name: ask(engine, name, ids, keep=True) for name in NAMES}
    assert {name: request.tokens() for name, request in again.items()} == want
    assert [request.sequence.usage.num_cached for request in again.values()] == [199, 199, 199]


def test_past_answers_are_of_one_tenant_and_one_adapter() -> None:
    past = AnswerHistory()
    past.add(CacheScope(b"t", b"a"), [1, 2, 3, 4, 5])
    for scope in (
        CacheScope(b"t"),
        CacheScope(b"t", b"b"),
        CacheScope(b"", b"a"),
        CacheScope(b"ta"),
        CacheScope(b"", b"ta"),
    ):
        assert not past.find(scope, [1, 2, 3], 1)
    assert past.find(CacheScope(b"t", b"a"), [1, 2, 3], 1)


def test_guesses_are_verified_with_the_adapter(engine: Engine) -> None:
    part = prompt(3, 24)
    ids = part + prompt(503, 6) + part
    asked = [("", None), ("a", None), ("b", None), ("a", 1)]
    want = {(name, seed): ask(engine, name, ids, 40, seed=seed).tokens() for name, seed in asked}
    for _ in range(2):
        guessed = {
            (name, seed): ask(engine, name, ids, 40, seed=seed, keep=True, guessed=SpeculationMode.NGRAM)
            for name, seed in want
        }
        assert {key: request.tokens() for key, request in guessed.items()} == want
    # The second time all of them have a past answer that says it all.
    assert all(request.sequence.speculation.num_accepted_tokens > 20 for request in guessed.values())


@pytest.mark.skipif(quantized_gemm.kernel() is None, reason="no CPU kernels run here")
def test_the_models_low_bit_copy_guesses_without_the_adapter_and_answers_stay(tmp_path: Path) -> None:
    engine = engine_of(2048, tmp_path, copy=True)
    for name in NAMES:
        want = ask(engine, name, prompt(4, 50), 20).tokens()
        request = ask(engine, name, prompt(4, 50), 20, guessed=SpeculationMode.DRAFT)
        assert request.tokens() == want
        assert request.sequence.speculation.num_draft_tokens > 0
    idle(engine)
    engine.check_integrity()
    engine.stop()


def test_a_pool_too_small_for_all_preempts_and_changes_no_answer(engine: Engine, tmp_path: Path) -> None:
    roomy = [ask(engine, NAMES[i % 3], prompt(i, 60), 100) for i in range(6)]
    want = [request.tokens() for request in roomy]
    small = engine_of(448, tmp_path)
    requests = small.between_steps(lambda: [ask(small, NAMES[i % 3], prompt(i, 60), 100, keep=True) for i in range(6)])
    assert [request.tokens() for request in requests] == want
    assert small.stats.preemptions > 0
    idle(small)
    small.check_integrity()
    small.stop()


@pytest.mark.parametrize("strategy", ["selective", "cacheblend", "guided"])
def test_a_repair_of_everything_is_a_prefill_with_the_adapter(strategy: str, engine: Engine) -> None:
    ids, pool = prompt(11, 120), engine.pool
    want = ask(engine, "a", ids, 1).tokens()
    idle(engine)
    table = pool.allocate(120)
    assert table is not None
    slots = torch.from_numpy(table.slots(0, 120))
    pool.keys[:, :, slots], pool.values[:, :, slots] = 1.0, -1.0  # what was stored is wrong altogether
    plan = ReusePlan(120, 0, (RelocatedSpan(0, 100),))
    work = SelectiveRecompute(
        engine.decoder, pool, ids, table, plan, SELECTORS[strategy], 1.0, adapter=engine.adapters["a"]
    )
    for _ in work.steps():
        pass
    assert int(work.logits[-1][-1].argmax()) == want[0]
    assert np.array_equal(work.chosen, np.arange(100))
    pool.free(table)
