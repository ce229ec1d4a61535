"""Both halves of the vLLM connector over a real daemon, told by hand what vLLM's scheduler tells them."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.transport import NoTransport

from benchmarks.node import Node
from tests.integrations.connector_pair import PROMPT, WHOLE, Request, Status, Vllm, start, until_no_lease
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS


def goes_on(engine: Vllm, request: Request) -> bool:
    """Whether a lookup, once it is answered, lets the request go on."""
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    tracked = engine.scheduler.tracked_request(request)
    assert tracked is not None
    assert tracked.lookup is not None
    tracked.lookup.answer.result(10)
    return engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is not None


def test_a_prompt_that_one_engine_computed_another_loads(node: Node, engines: ExitStack) -> None:
    one, two = start(engines, node, "pair"), start(engines, node, "pair", transposed=True)
    first = Request("a", PROMPT)
    assert one.matched(first) == (0, False)
    one.compute(first, [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert two.matched(again) == (WHOLE, True)
    two.allocated(again, [4, 2, 0, 3, 1], WHOLE)
    step = two.step()
    assert [load.blocks for load in step.loads] == [[4, 2, 0, 3]]
    two.wait(set(), {"b"})
    assert two.workers[0].get_block_ids_with_load_errors() == set()
    assert two.payload(0, [4, 2, 0, 3]) == one.payload(0, [0, 1, 2, 3])
    # It is stored already: nothing more is, and nothing is waited for.
    two.allocated(again, [4, 2, 0, 3, 1], 0)
    again.num_computed_tokens = WHOLE
    assert not two.step({"b": (again, 3, [4, 2, 0, 3, 1])}).stores
    again.status = Status.FINISHED_STOPPED
    assert not two.scheduler.request_finished(again, [4, 2, 0, 3, 1])


def test_what_vllm_has_of_its_own_is_not_loaded(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "own")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again, 2 * BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
    one.allocated(again, [0, 1, 2, 3], 2 * BLOCK_TOKENS)
    (load,) = one.step().loads
    assert (load.first, len(load.tokens)) == (2 * BLOCK_TOKENS, WHOLE)
    one.wait(set(), {"b"})
    assert one.matched(Request("c", PROMPT), WHOLE) == (0, False)


def test_what_is_being_loaded_for_one_request_is_waited_for_by_others(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "together")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    branch = PROMPT[: 2 * BLOCK_TOKENS] + [7] * (2 * BLOCK_TOKENS + 1)
    less = PROMPT[:BLOCK_TOKENS] + [8] * (3 * BLOCK_TOKENS + 1)
    for name, ids in (("b", branch), ("c", less)):
        one.compute(Request(name, ids), [0, 1, 2, 3, 4])
    two, alone = start(engines, node, "together"), start(engines, node, "together", shares=False)
    first = Request("d", PROMPT)
    for engine in (two, alone):
        assert engine.matched(first) == (WHOLE, True)
        engine.allocated(first, [0, 1, 2, 3], WHOLE)
    assert two.matched(Request("other", less)) == (WHOLE, True), "three of its four blocks are another's"
    waiting, same, stranger = Request("e", branch), Request("f", PROMPT), Request("g", PROMPT, cache_salt="other")
    assert alone.matched(waiting) == (WHOLE, True)
    for request in (waiting, same):
        assert not goes_on(two, request), "it is waited for"
    assert two.matched(stranger) == (0, False)
    two.step()
    two.wait(set(), {"d"})
    assert two.matched(waiting, 2 * BLOCK_TOKENS) == (2 * BLOCK_TOKENS, True)
    assert two.matched(same, WHOLE) == (0, False)


def test_a_producer_loads_nothing_and_a_consumer_stores_nothing(node: Node, engines: ExitStack) -> None:
    consumer = start(engines, node, "roles", stores=False)
    consumer.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    producer = start(engines, node, "roles", loads=False)
    first = Request("b", PROMPT)
    assert producer.matched(first) == (0, False)
    producer.compute(first, [0, 1, 2, 3, 4])
    assert producer.workers[0].stats.take()["stored_chunks"] == 4, "the consumer had stored some of it"
    assert producer.matched(Request("c", PROMPT)) == (0, False)
    assert consumer.matched(Request("d", PROMPT)) == (WHOLE, True)


def test_ranks_hit_only_where_all_have_it(node: Node, engines: ExitStack) -> None:
    both = start(engines, node, "ranks", ranks=2)
    alone = both.workers.pop()  # the second rank stores nothing
    both.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    both.workers.append(alone)
    assert both.matched(Request("b", PROMPT)) == (0, False)
    both.compute(Request("c", PROMPT), [0, 1, 2, 3, 4])
    again = Request("d", PROMPT)
    assert both.matched(again) == (WHOLE, True)
    expected = [both.payload(rank, [0, 1, 2, 3]) for rank in range(2)]
    assert expected[0] != expected[1]
    both.allocated(again, [4, 3, 2, 1], WHOLE)
    both.step()
    both.wait(set(), {"d"})
    assert [both.payload(rank, [4, 3, 2, 1]) for rank in range(2)] == expected


def test_blocks_of_a_preempted_request_are_not_read_any_more(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "preempted")
    request = Request("a", PROMPT)
    assert one.matched(request) == (0, False)
    one.allocated(request, [0, 1, 2, 3, 4], 0)
    one.step({"a": (request, len(PROMPT), [0, 1, 2, 3, 4])})
    one.step(preempted=("a",))
    reads = []
    pack = BlockCopier.pack

    def watched(self: BlockCopier, *arguments: Any) -> None:
        reads.append(arguments)
        pack(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCopier, "pack", watched)
        one.wait(set(), set())
        one.workers[0]._stores.submit(lambda: None).result(10)  # behind what was queued
    assert not reads
    # It comes back and is stored then.
    request.num_computed_tokens = 0
    one.matched(request)
    one.allocated(request, [4, 3, 2, 1, 0], 0)
    one.step({"a": (request, len(PROMPT), [4, 3, 2, 1, 0])})
    request.status = Status.FINISHED_STOPPED
    assert one.scheduler.request_finished(request, [4, 3, 2, 1, 0])
    one.step()
    one.wait({"a"}, set())
    assert one.matched(Request("b", PROMPT)) == (WHOLE, True)


def test_stores_that_wait_keep_no_more_than_a_quarter_of_the_blocks(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, go, pack = start(engines, node, "pinned"), threading.Event(), BlockCopier.pack

    def late(*arguments: Any) -> None:
        assert go.wait(10)
        pack(*arguments)

    def run(name: str, blocks: list[int], first: int) -> bool:
        request = Request(name, list(range(first, first + 2 * BLOCK_TOKENS + 1)))
        one.matched(request)
        one.allocated(request, blocks, 0)
        one.step({name: (request, request.num_tokens, blocks)})
        request.status = Status.FINISHED_STOPPED
        return one.scheduler.request_finished(request, blocks)

    monkeypatch.setattr(BlockCopier, "pack", late)
    try:
        assert run("a", [0, 1, 2], 7000), "one alone may be larger"
        assert not run("b", [3, 4], 8000)
        assert one.step().dropped == {"b"}
    finally:
        go.set()
    one.wait({"a"}, set())
    assert one.workers[0].stats.take()["dropped_stores"] == 1
    assert one.matched(Request("c", list(range(8000, 8000 + 3 * BLOCK_TOKENS)))) == (0, False)
    assert run("d", [3, 4, 0], 8000)
    one.step()
    one.wait({"d"}, set())
    assert one.matched(Request("e", list(range(8000, 8000 + 3 * BLOCK_TOKENS)))) == (2 * BLOCK_TOKENS, True)


def test_a_load_that_breaks_off_names_its_blocks(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "breaks")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again) == (WHOLE, True)
    one.allocated(again, [4, 3, 2, 1], WHOLE)

    def fails(*_: Any) -> None:
        raise ConnectionError("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCopier, "unpack", fails)
        one.step()
        one.wait(set(), {"b"})
    assert one.workers[0].get_block_ids_with_load_errors() == {4, 3, 2, 1}
    assert one.workers[0].get_block_ids_with_load_errors() == set(), "told once"
    assert one.workers[0].stats.take()["failed_loads"] == 1
    assert one.scheduler.get_num_new_matched_tokens(again, 0) == (0, False), "not tried again"


def test_without_a_daemon_there_are_misses_and_nothing_waits(engines: ExitStack) -> None:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 5000}) as short:
        one = start(engines, short, "away")
        one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
        short.kill("daemon")
        while any(link.session is not None for link in one.links):
            time.sleep(0.005)
        request = Request("b", PROMPT)
        assert one.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        one.allocated(request, [0, 1, 2, 3, 4], 0)
        assert not one.step({"b": (request, len(PROMPT), [0, 1, 2, 3, 4])}).stores
        request.status = Status.FINISHED_STOPPED
        assert not one.scheduler.request_finished(request, [0, 1, 2, 3, 4])


def test_a_daemon_that_hangs_is_not_waited_for(engines: ExitStack) -> None:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 200}) as short:
        one = start(engines, short, "hangs")
        one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
        short.kill("daemon", signal.SIGSTOP)
        try:
            assert one.matched(Request("b", PROMPT)) == (0, False)
        finally:
            short.kill("daemon", signal.SIGCONT)


def test_a_request_that_goes_while_it_loads_leaves_no_lease(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "goes")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    again = Request("b", PROMPT)
    assert one.matched(again) == (WHOLE, True)
    one.allocated(again, [4, 3, 2, 1], WHOLE)
    one.step()
    again.status = Status.FINISHED_ABORTED
    assert not one.scheduler.request_finished(again, [4, 3, 2, 1]), "vLLM keeps the blocks by itself"
    one.wait(set(), {"b"})
    assert "b" not in one.scheduler._requests
    until_no_lease(node)


def test_after_a_reset_nothing_of_before_is_found_nor_by_others(node: Node, engines: ExitStack) -> None:
    """vLLM resets when its weights were changed in place."""
    one, other = start(engines, node, "reset"), start(engines, node, "reset")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    one.scheduler.reset_cache()
    assert one.matched(Request("b", PROMPT)) == (0, False)
    longer = [*PROMPT, *PROMPT]
    one.compute(Request("c", longer[: 2 * BLOCK_TOKENS + 1]), [0, 1, 2])
    assert one.matched(Request("d", longer)) == (2 * BLOCK_TOKENS, True)
    assert other.matched(Request("e", longer)) == (WHOLE, True), "of before, which is right for it"


def test_between_two_resets_nothing_is_stored_for_others(node: Node, engines: ExitStack) -> None:
    """Without a pause, prompts are computed after a first reset, during the change, and before a second reset."""
    one, other = start(engines, node, "two resets"), start(engines, node, "two resets")
    one.scheduler.reset_cache()
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    one.scheduler.reset_cache()
    for engine in (one, other):
        assert engine.matched(Request("b", PROMPT)) == (0, False)


@pytest.mark.parametrize("keeps", [False, True])
def test_after_a_sleep_chunks_are_found_if_the_engine_never_changes_weights(
    node: Node, engines: ExitStack, keeps: bool
) -> None:
    """vLLM's sleep aborts all requests, waits until their blocks are free, and resets the connector."""
    one = start(engines, node, f"sleep {keeps}", reset_keeps_chunks=keeps)
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    request = Request("b", [*PROMPT[:BLOCK_TOKENS], *PROMPT])
    assert one.matched(request) == (BLOCK_TOKENS, True)
    one.allocated(request, [0], BLOCK_TOKENS)
    one.step()
    one.wait(set(), {"b"})
    request.num_computed_tokens = BLOCK_TOKENS
    one.step({"b": (request, BLOCK_TOKENS, [0, 1])})
    request.status = Status.FINISHED_ABORTED
    assert one.scheduler.request_finished(request, [0, 1])
    one.step()
    one.wait({"b"}, set())
    one.scheduler.reset_cache()
    assert one.matched(Request("c", PROMPT)) == ((WHOLE, True) if keeps else (0, False))


def test_a_request_that_failed_stores_no_answer(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "failed")
    request = Request("a", PROMPT)
    one.matched(request)
    one.allocated(request, [0, 1, 2, 3, 4], 0)
    request.num_computed_tokens, request.status = WHOLE, Status.FINISHED_ERROR
    assert not one.scheduler.request_finished(request, [0, 1, 2, 3, 4])


def test_the_scheduler_maps_no_payloads(node: Node, engines: ExitStack) -> None:
    one = start(engines, node, "maps")
    (session,) = one.scheduler._sessions()
    assert session is not None
    assert session.summary is not None
    assert isinstance(session.transport, NoTransport)


def test_a_load_waits_for_work_that_the_engine_enqueued_before(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, enqueued steps may still read the blocks for the request that had them before."""
    one = start(engines, node, "ordered")
    request = Request("a", PROMPT)
    assert one.matched(request) == (0, False)
    one.compute(request, [0, 1, 2, 3, 4])
    event, waited, unpack = object(), list[Any](), BlockCopier.unpack

    def recording(copier: BlockCopier, slots: Any, header: Any, payload: Any, after: Any = None) -> None:
        waited.append(after)
        unpack(copier, slots, header, payload)

    monkeypatch.setattr(one.workers[0], "_enqueued_work", lambda: event)
    monkeypatch.setattr(BlockCopier, "unpack", recording)
    again = Request("b", PROMPT)
    assert one.matched(again) == (WHOLE, True)
    one.allocated(again, [4, 2, 0, 3, 1], WHOLE)
    one.step()
    one.wait(set(), {"b"})
    assert waited == [event] * 4
