"""A sequence that has to give its pages back keeps what it computed, where there is a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.node import Node
from inference_svc.scheduling.scheduler import SchedulerEntry, plan_step
from tests.inference_svc.server.test_load import idle
from tests.inference_svc.windowed import SlowCache, prompt, windowed

PLAIN = "LlamaForCausalLM"
PROMPTS = [prompt(100 + i, 300) for i in range(4)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="64MiB") as node:
        yield node


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    large = windowed(PLAIN)
    found = [large.answer(ids, 200, read=False, write=False)[0] for ids in PROMPTS]
    large.close()
    return found


def test_what_was_computed_is_loaded_again(daemon: Node, want: list[list[int]]) -> None:
    engine = windowed(PLAIN, tokens=1504, node=daemon, prefix_cache_sequences=0)
    requests = engine.request_together(PROMPTS, 200)
    assert [r.tokens() for r in requests] == want
    idle(engine.engine)
    engine.engine.check_integrity()
    assert engine.engine.stats.preemptions > 0
    assert engine.engine.free_pages == engine.engine.pool.pages
    assert engine.cache is not None
    assert engine.cache.stats.loaded_bytes > 0, "it was computed again"
    engine.close()


def test_cancelled_while_it_is_stored_it_ends(want: list[list[int]]) -> None:
    slow = SlowCache()
    engine = windowed(PLAIN, tokens=1504, slow=slow, prefix_cache_sequences=0)
    requests = [engine.request(ids, 200) for ids in PROMPTS]
    slow.wait()
    leaving = engine.engine._core.preempted_kv_saver.sequences
    assert leaving
    for request in requests[1:]:
        engine.engine.cancel(request.sequence)
    engine.engine.check_integrity()
    slow.go_on()
    for request in requests[1:]:
        assert request.ended.wait(30)
    assert leaving[0] in [r.sequence for r in requests[1:]]
    assert requests[0].tokens() == want[0]
    idle(engine.engine)
    engine.engine.check_integrity()
    assert engine.engine.free_pages == engine.engine.pool.pages
    engine.close()


def test_while_pages_come_nobody_is_preempted() -> None:
    full = SchedulerEntry(arrived_at=0.0, num_uncomputed=1, free_slots=0, exclusive_pages=4)
    young = SchedulerEntry(arrived_at=1.0, num_uncomputed=1, free_slots=0, exclusive_pages=4)
    assert plan_step([full, young], 64, 0, 32).preempted == (1,)
    waiting = plan_step([full, young], 64, 0, 32, pending_pages=1)
    assert (waiting.preempted, waiting.rows) == ((), ())
    assert plan_step([full, young], 64, 1, 32, pending_pages=1).rows == ((0, 1),)
    prompt_first = plan_step([replace(full, num_uncomputed=64), young], 128, 1, 32, pending_pages=1)
    assert prompt_first.rows == (), "what is free is kept for the older one"
