"""Prefill times per token that the vLLM connector measures and stores with chunks."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvsidecar.integrations.vllm import scheduler_connector, tracked_request, worker_connector
from kvsidecar.kv_transfer.chunk_writer import ChunkWriter

from benchmarks.node import Node
from tests.integrations.connector_pair import Request, Status, Vllm, start
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS

PROMPT = list(range(500, 500 + 8 * BLOCK_TOKENS + 3))
BLOCKS = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (scheduler_connector, tracked_request, worker_connector):
        patched = SimpleNamespace(monotonic=lambda: found.now, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", patched)
    return found


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The prefill times per token that stores report to the daemon."""
    found, store = list[float](), ChunkWriter.store

    def recorded(*arguments: Any, **options: Any) -> Any:
        found.append(options["token_seconds"])
        return store(*arguments, **options)

    monkeypatch.setattr(ChunkWriter, "store", recorded)
    return found


def output(request: Request, tokens: int) -> Any:
    """Return the scheduler's output for a step of one request."""
    return SimpleNamespace(
        preempted_req_ids=(),
        num_scheduled_tokens={request.request_id: tokens},
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: (BLOCKS,)),
    )


def schedule(engine: Vllm, request: Request, tokens: int, clock: Clock, seconds: float) -> None:
    """Run a step of one request that takes ``seconds`` until its stores begin."""
    step = engine.scheduler.build_connector_meta(output(request, tokens))
    request.num_computed_tokens += tokens
    clock.pass_time(seconds)
    engine.workers[0].start_store_kv(step)


def finish(engine: Vllm, request: Request, status: Status = Status.FINISHED_STOPPED) -> None:
    request.status = status
    assert engine.scheduler.request_finished(request, BLOCKS)
    engine.step()
    engine.wait({request.request_id}, set())


def test_the_tokens_of_a_decode_do_not_count_as_prefill(
    node: Node, engines: ExitStack, clock: Clock, reported: list[float]
) -> None:
    one = start(engines, node, "decodes")
    request = Request("a", list(PROMPT))
    assert one.matched(request) == (0, False)
    one.allocated(request, BLOCKS, 0)
    schedule(one, request, len(PROMPT) - 10, clock, 2.5)
    schedule(one, request, 10, clock, 1.0)  # the prompt is complete, 3.5 s after its first step
    for token in range(6):
        request.all_token_ids.append(token)
        schedule(one, request, 1, clock, 100.0)
    finish(one, request)
    assert reported == [pytest.approx(3.5 / len(PROMPT))] * 2
    assert one.scheduler._prefill_rate.seconds_per_token == pytest.approx(3.5 / len(PROMPT))


def test_only_computed_tokens_count(node: Node, engines: ExitStack, clock: Clock, reported: list[float]) -> None:
    """vLLM sets ``num_computed_tokens`` to its own cached tokens after it has allocated the blocks."""
    one = start(engines, node, "local hits")
    request = Request("a", list(PROMPT))
    assert one.matched(request, 2 * BLOCK_TOKENS) == (0, False)
    one.allocated(request, BLOCKS, 0)
    request.num_computed_tokens = 2 * BLOCK_TOKENS
    schedule(one, request, len(PROMPT) - 2 * BLOCK_TOKENS, clock, 1.9)
    finish(one, request)
    assert reported == [pytest.approx(1.9 / (len(PROMPT) - 2 * BLOCK_TOKENS))]


def test_a_few_tokens_are_not_measured(node: Node, engines: ExitStack, clock: Clock, reported: list[float]) -> None:
    """A step has a fixed cost, so they take the mean of other prompts."""
    one = start(engines, node, "few")
    for first, mean in ((1, 0.0), (2, 0.25)):
        one.scheduler._prefill_rate.seconds_per_token = mean
        request = Request(f"request {first}", [first, *PROMPT])
        one.matched(request, 8 * BLOCK_TOKENS)
        one.allocated(request, BLOCKS, 0)
        request.num_computed_tokens = 8 * BLOCK_TOKENS
        schedule(one, request, request.num_tokens - 8 * BLOCK_TOKENS, clock, 1.9)
        for token in range(8):
            request.all_token_ids.append(token)
            schedule(one, request, 1, clock, 100.0)
        finish(one, request)
    assert reported == [0.0, 0.0, 0.25, 0.25]


def test_a_prefill_that_was_aborted_counts_its_own_tokens(
    node: Node, engines: ExitStack, clock: Clock, reported: list[float]
) -> None:
    one = start(engines, node, "aborted")
    request = Request("a", [*PROMPT, *range(1000)])
    assert one.matched(request) == (0, False)
    one.allocated(request, BLOCKS, 0)
    schedule(one, request, 4 * BLOCK_TOKENS, clock, 1.6)
    finish(one, request, Status.FINISHED_ABORTED)
    assert reported == [pytest.approx(1.6 / (4 * BLOCK_TOKENS))]


def test_a_prefill_ends_with_its_first_output(
    node: Node, engines: ExitStack, clock: Clock, reported: list[float]
) -> None:
    """With asynchronous scheduling, vLLM builds the next step while the prompt is still being computed."""
    one = start(engines, node, "overlaps")
    request = Request("a", list(PROMPT))
    assert one.matched(request) == (0, False)
    one.allocated(request, BLOCKS, 0)
    schedule(one, request, len(PROMPT), clock, 0.1)
    schedule(one, request, 1, clock, 3.4)
    request.all_token_ids.append(0)
    for token in range(1, 6):
        schedule(one, request, 1, clock, 100.0)
        request.all_token_ids.append(token)
    finish(one, request)
    assert reported[-1] == pytest.approx(3.5 / len(PROMPT))


@pytest.mark.parametrize("ahead", [1000.0, -1e9])
def test_the_clock_of_another_host_is_not_compared(
    node: Node, engines: ExitStack, reported: list[float], ahead: float
) -> None:
    """The monotonic clock of the scheduler's host says nothing about that of a rank on another host."""
    one = start(engines, node, f"other host {ahead}")
    session = one.workers[0]._connection.session
    request = Request("a", list(PROMPT))
    assert one.matched(request) == (0, False)
    one.allocated(request, BLOCKS, 0)
    step = one.scheduler.build_connector_meta(output(request, len(PROMPT)))
    step.stores[:] = [replace(store, began=time.monotonic() + ahead) for store in step.stores]
    request.num_computed_tokens = len(PROMPT)
    one.workers[0].start_store_kv(step)
    finish(one, request)
    assert one.workers[0].stats.take()["stored_chunks"] > 0
    assert one.workers[0]._connection.session is session, "the daemon accepts the chunks"
    assert reported[0] == 0.0
