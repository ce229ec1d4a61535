"""Adapters that are loaded and unloaded while an engine computes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import structlog
import torch
from kvsidecar.errors import Overloaded, Unavailable, UnknownModel

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner.engine_lost import EngineLost
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sequence.generation_request import CacheParams, SpeculationMode
from inference_svc.sequence.kv_connector import LoadCallback, LoadResult, NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.lora.random_adapters import adapter, linears, tensors, write
from tests.inference_svc.lora.test_engine import ask, engine_of
from tests.inference_svc.lora.test_lora_admin import wait
from tests.inference_svc.server.test_load import Request, idle


class Slow(NullKVConnector):
    """Connector that only records the requested loads."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence, LoadCallback]] = []

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        self.asked.append((sequence, done))
        return True


def failure(request: Request) -> str:
    """Why a request failed."""
    assert request.ended.wait(120)
    return str(request.outputs[-1].error)


def test_sequences_of_every_state_end_and_no_page_is_lost(tmp_path: Path) -> None:
    engine = engine_of(2048, tmp_path, max_num_seqs=4)
    slow = Slow()
    engine._core._connector = slow
    reached, go_on, stack = threading.Event(), threading.Event(), ExitStack()
    try:
        loading = ask(engine, "a", prompt(3, 40), 8, keep=True)
        wait(lambda: slow.asked)
        # The engine's thread stands still with the first token, so that all is as it is meant to be.
        running = Request(prompt(0, 40), 200)
        tell = running.sequence.sink

        def hold(output: SequenceOutput) -> None:
            tell(output)
            reached.set()
            assert go_on.wait(120)

        running.sequence.sink = hold
        running.sequence.request = replace(running.sequence.request, adapter=engine.adapters["a"])
        running.sequence.request = replace(running.sequence.request, cache=CacheParams(read=False, write=False))
        engine.submit(running.sequence)
        assert reached.wait(120)
        other = ask(engine, "b", prompt(4, 40), 8)
        waiting = [ask(engine, "a", prompt(5 + i, 40), 8) for i in range(4)]
        gone = engine.adapters["a"]
        logged = stack.enter_context(structlog.testing.capture_logs())
        with ThreadPoolExecutor(1) as thread:
            dropped = thread.submit(engine.drop, "a")
            go_on.set()
            assert dropped.result(120) is gone
        late = Request(prompt(9, 40), 8)
        late.sequence.request = replace(late.sequence.request, adapter=gone)
        engine.submit(late.sequence)
        assert not loading.ended.is_set()  # another thread has its pages
        for sequence, done in slow.asked:
            done(sequence, LoadResult())
        ended = {failure(one) for one in (loading, running, *waiting, late)}
        assert ended == {"the adapter 'a' has been unloaded"}
        said = [line for line in logged if "has been unloaded" in line.get("error", "")]
        assert len(said) == 7
        assert {line["log_level"] for line in said} == {"info"}, "nothing is broken"
        assert not any("exc_info" in line for line in said)
        assert len(other.tokens()) == 8
        idle(engine)
        engine.check_integrity()
        with pytest.raises(UnknownModel):
            engine.drop("a")
    finally:
        go_on.set()
        engine.stop()
        stack.close()


def test_loading_and_unloading_again_and_again_changes_no_answer_of_others(tmp_path: Path) -> None:
    engine = engine_of(2048, tmp_path)
    try:
        want = ask(engine, "b", prompt(4, 40), 64).tokens()
        first = ask(engine, "a", prompt(0, 40), 4).tokens()
        weights = adapter(tmp_path / "a", engine.loaded, "a")
        for _ in range(5):
            beside = ask(engine, "b", prompt(4, 40), 64)
            engine.drop("a")
            engine.adopt(weights)
            assert ask(engine, "a", prompt(0, 40), 4).tokens() == first
            assert beside.tokens() == want
        idle(engine)
        engine.check_integrity()
    finally:
        engine.stop()
    with pytest.raises(Unavailable):
        engine.adopt(weights)


@pytest.mark.parametrize("fails", [False, True])
def test_the_trial_row_of_an_adapter_that_overflows_leaves_a_free_and_finite_pool(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(2048, tmp_path)
    compute, computed = engine._core.compute, []

    def compute_and_fail(slices: list[SequenceSlice]) -> torch.Tensor:
        computed.append(compute(slices))
        if fails:
            raise RuntimeError("out of memory")
        return computed[-1]

    try:
        write(tmp_path / "big", tensors(linears(engine.loaded), 1), lora_alpha=1e38)
        weights = adapter(tmp_path / "big", engine.loaded, "big")
        engine.between_steps(lambda: monkeypatch.setattr(engine._core, "compute", compute_and_fail))
        if fails:
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.adopt(weights)
        else:
            engine.adopt(weights)
        assert not computed[0].isfinite().any()
        assert ("big" in engine.adapters) == (not fails)
        engine.check_integrity()
        assert engine.pool.keys.isfinite().all()
        assert engine.pool.values.isfinite().all()
    finally:
        engine.stop()


def test_a_full_pool_makes_space_for_the_trial_row_or_refuses_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without a trial row might fail at its first request."""
    engine = engine_of(2048, tmp_path)
    pool, compute, tried = engine.pool, engine._core.compute, list[LoraAdapter | None]()

    def noted(slices: list[SequenceSlice]) -> torch.Tensor:
        tried.extend(piece.adapter for piece in slices)
        return compute(slices)

    try:
        assert len(ask(engine, "b", prompt(0, 1000), 4, keep=True).tokens()) == 4
        idle(engine)
        weights = adapter(tmp_path / "a", engine.loaded, "new")
        engine.between_steps(lambda: monkeypatch.setattr(engine._core, "compute", noted))
        tables = [engine.between_steps(lambda: pool.allocate(pool.free_pages * PAGE_TOKENS))]
        assert engine.resident_sequences == 1
        assert engine.adopt(weights) is engine.adapters["new"] is tried[-1]
        assert engine.resident_sequences == 0
        engine.drop("new")
        tables.append(engine.between_steps(lambda: pool.allocate(pool.free_pages * PAGE_TOKENS)))
        with pytest.raises(Overloaded, match="running requests use the whole KV pool"):
            engine.adopt(weights)
        assert "new" not in engine.adapters
        assert len(tried) == 1
        for table in tables:
            assert table is not None
            engine.between_steps(partial(pool.free, table))
        engine.check_integrity()
    finally:
        engine.stop()


def test_a_trial_row_that_loses_the_device_ends_the_engine_and_leaves_the_pool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(2048, tmp_path)
    zeroed: list[BlockTable] = []

    def lose(slices: list[SequenceSlice]) -> torch.Tensor:
        monkeypatch.setattr(engine.pool, "zero_exclusive", zeroed.append)
        raise EngineLost("the device computes no more")

    try:
        engine.between_steps(lambda: monkeypatch.setattr(engine._core, "compute", lose))
        with pytest.raises(Unavailable, match="the device computes no more"):
            engine.adopt(adapter(tmp_path / "a", engine.loaded, "new"))
        assert "the device computes no more" in str(engine.died.result(60))
        assert not zeroed, "copies to a lost device may hang"
    finally:
        engine.stop()


def test_unloading_while_guesses_are_verified_ends_those_that_name_it_alone(tmp_path: Path) -> None:
    engine = engine_of(2048, tmp_path, num_speculative_branches=3)
    part = prompt(3, 24)
    ids = part + prompt(503, 6) + part
    try:
        want = {name: ask(engine, name, ids, 40).tokens() for name in ("", "b")}
        first = ask(engine, "a", ids, 40).tokens()
        weights = adapter(tmp_path / "a", engine.loaded, "a")
        for tokens in (0, 1, 2, 5, 9, 30):
            going = [ask(engine, "a", ids, 400, guessed=SpeculationMode.NGRAM) for _ in range(2)]
            others = {name: ask(engine, name, ids, 40, guessed=SpeculationMode.NGRAM) for name in want}
            wait(lambda one=going[0], tokens=tokens: len(one.outputs) >= tokens)
            engine.drop("a")
            for one in going:
                assert one.ended.wait(120)
                last = one.outputs[-1]
                assert last.finish is not FinishReason.FAILED or str(last.error) == "the adapter 'a' has been unloaded"
            assert {name: one.tokens() for name, one in others.items()} == want
            engine.adopt(weights)
            assert ask(engine, "a", ids, 40, guessed=SpeculationMode.NGRAM).tokens() == first
        assert engine.speculator.stats.accepted_tokens > 0
        idle(engine)
        engine.check_integrity()
        assert engine.free_pages == engine.pool.pages
        assert not engine.speculator._own
    finally:
        engine.stop()
