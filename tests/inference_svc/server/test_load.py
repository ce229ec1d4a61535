"""Many requests, many of them cancelled: everything is given back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from kvsidecar.errors import Overloaded, PromptExceedsPool, PromptTooLong, status_of

from benchmarks.node import Node
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models.loader import load
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.scheduling import scheduler
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.sequence.test_detokenizer import TOKENIZER


@pytest.fixture(scope="module", params=[0, 64], ids=["without residents", "with residents"])
def loaded_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    flags = {"resident_sequences": request.param}
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running


def test_200_requests_a_third_cancelled_leave_nothing(loaded_node: Node) -> None:
    node = loaded_node
    rng = random.Random(0)
    system = prompt(1, 150)

    def one(i: int) -> str:
        r = random.Random(i)
        ids = (system if r.random() < 0.5 else []) + prompt(1000 + i % 40, r.randint(1, 200))
        cancel_after = r.uniform(0.0, 0.4) if i % 3 == 0 else None
        stream = node.client().stream(ids, max_tokens=r.randint(1, 40), temperature=r.choice([0, 1]), deadline=120)
        if cancel_after is None:
            return "done" if list(stream)[-1].final else "cut"
        deadline = time.monotonic() + cancel_after
        for _ in stream:
            if time.monotonic() > deadline:
                break
        stream.close()
        return "cancelled"

    order = list(range(200))
    rng.shuffle(order)
    with ThreadPoolExecutor(32) as pool:
        outcomes = list(pool.map(one, order))
    assert outcomes.count("cut") == 0
    assert outcomes.count("done") == 200 - len([i for i in range(200) if i % 3 == 0])
    node.settle()
    deadline = time.monotonic() + 60
    while True:
        worker, cache = node.client().stats(), node.cache_stats()
        held = worker.running, worker.waiting, worker.pending_saves, cache.leases, cache.reservations
        if held == (0, 0, 0, 0, 0) and worker.pool_free_pages == worker.pool_pages:
            break  # the last leases are given back without waiting for an answer
        assert time.monotonic() < deadline, (worker, cache)
        time.sleep(0.02)
    assert worker.cache_failures == 0


def small_engine(tokens: int, **limits: Any) -> Engine:
    """An engine with a pool of its own size; a model serves one engine only."""
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, tokens, loaded.dtype, loaded.device)
    return Engine(loaded, pool, NullKVConnector(), EngineLimits(**limits))


class Request:
    """A sequence and its result."""

    def __init__(self, ids: list[int], length: int, seed: int | None = None) -> None:
        self.outputs: list[SequenceOutput] = []
        self.ended = threading.Event()
        params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
        text = IncrementalDetokenizer(TOKENIZER, (), frozenset())
        self.sequence = Sequence(
            GenerationRequest("r", len(ids), length, params, frozenset()), list(ids), text, self._sink
        )

    def _sink(self, output: SequenceOutput) -> None:
        self.outputs.append(output)
        if output.finish is not None:
            self.ended.set()

    def tokens(self) -> list[int]:
        assert self.ended.wait(60)
        assert self.outputs[-1].finish is not FinishReason.FAILED, self.outputs[-1].error
        return self.sequence.tokens[self.sequence.request.num_prompt_tokens :]


def submit_together(engine: Engine, requests: Iterable[Request]) -> None:
    """Submit between two steps, so that no request has ended before the last one runs."""
    engine.between_steps(lambda: [engine.submit(request.sequence) for request in requests])


def idle(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while engine.load != (0, 0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_pool_too_small_for_all_preempts_and_changes_no_answer() -> None:
    prompts = [prompt(i, 60) for i in range(6)]
    large = small_engine(4096)
    want = []
    for i, ids in enumerate(prompts):
        request = Request(ids, 120, seed=i if i % 2 else None)
        large.submit(request.sequence)
        want.append(request.tokens())
    large.stop()
    engine = small_engine(448)
    requests = [Request(ids, 120, seed=i if i % 2 else None) for i, ids in enumerate(prompts)]
    began = time.perf_counter()
    submit_together(engine, requests)
    assert [r.tokens() for r in requests] == want
    assert engine.stats.preemptions > 0
    passed_ms = (time.perf_counter() - began) * 1e3
    assert all(r.sequence.timings.queue_ms < passed_ms for r in requests), "waiting was counted twice"
    idle(engine)
    engine.check_integrity()
    assert engine.free_pages == engine.pool.pages
    engine.stop()


def test_the_scheduler_knows_what_a_preemption_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise preempt all sequences for one page."""
    freed: list[int] = []
    plan_step = scheduler.plan_step

    def planned(entries: list[scheduler.SchedulerEntry], *more: Any) -> scheduler.StepPlan:
        step = plan_step(entries, *more)
        freed.extend(entries[i].exclusive_pages for i in step.preempted)
        return step

    monkeypatch.setattr(scheduler, "plan_step", planned)
    engine = small_engine(448)
    requests = [Request(prompt(i, 60), 120) for i in range(6)]
    submit_together(engine, requests)
    for request in requests:
        assert len(request.tokens()) == 120
    assert freed
    assert min(freed) > 0
    engine.stop()


def test_cancelling_frees_pages_at_once() -> None:
    engine = small_engine(2048)
    requests = [Request(prompt(i, 100), 500) for i in range(4)]
    submit_together(engine, requests)
    while not requests[-1].outputs:
        time.sleep(0.001)
    for request in requests:
        engine.cancel(request.sequence)
        engine.cancel(request.sequence)
    for request in requests:
        assert request.ended.wait(60)
        assert request.outputs[-1].finish is FinishReason.CANCELLED
    idle(engine)
    engine.check_integrity()
    assert engine.free_pages == engine.pool.pages
    engine.stop()


@contextmanager
def held_at_first_token(request: Request) -> Iterator[None]:
    """Let the engine's thread wait at the request's first token until the block ends."""
    over, sink = threading.Event(), request.sequence.sink

    def hold(output: SequenceOutput) -> None:
        sink(output)
        assert over.wait(60)

    request.sequence.sink = hold
    try:
        yield
    finally:
        over.set()


def test_what_cannot_run_is_refused() -> None:
    engine = small_engine(256, max_queue=1, max_num_seqs=1)
    running = Request(prompt(0, 100), 150)
    with held_at_first_token(running):
        engine.submit(running.sequence)
        while not running.outputs:
            time.sleep(0.001)
        context = engine.loaded.context_length
        with pytest.raises(PromptTooLong, match=f"the maximum context length is {context} with"):
            engine.submit(Request(prompt(0, context), 1).sequence)
        numbers = rf"256 tokens, which .* need 9 pages of 32 tokens; .* pool has 8, .* 256 .* \(of the {context} "
        with pytest.raises(PromptExceedsPool, match=numbers) as refused:
            engine.submit(Request(prompt(0, 256), 1).sequence)
        assert status_of(refused.value) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 413)
        engine.submit(Request(prompt(1, 10), 1).sequence)
        with pytest.raises(Overloaded, match="1 requests wait"):
            engine.submit(Request(prompt(2, 10), 1).sequence)
    assert len(running.tokens()) == 150  # undisturbed
    engine.stop()
