"""Lookups of the vLLM connector: waits, failures, statistics, and the hints of requests."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.integrations.vllm import pending_lookup, scheduler_connector
from kvsidecar.kv_transfer.prefix_lookup import PrefixLookup
from kvsidecar.kv_transfer.session import Session

from benchmarks.node import Node
from tests.integrations.connector_pair import PROMPT, WHOLE, Request, Vllm, start, until_no_lease
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS


def test_lookups_are_counted_by_outcome_and_the_session_is_reported() -> None:
    with (
        Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 5000}) as short,
        closing(Vllm(short, "counted")) as one,
    ):
        one.matched(Request("a", PROMPT))
        assert one.scheduler.take_stats() == {"lookups.skipped": 1, "attached": 1.0}
        one.compute(Request("b", PROMPT), [0, 1, 2, 3, 4])
        one.matched(Request("c", PROMPT))
        one.matched(Request("d", [9, *PROMPT]))
        found = one.scheduler.take_stats()
        assert found.pop("lookups.hit") == 1
        assert sum(found.values()) == 1, "d is a miss, or excluded by the filter"
        short.kill("daemon")
        deadline = time.monotonic() + 30
        while (found := one.scheduler.take_stats()) != {"attached": 0.0}:
            assert not found
            assert time.monotonic() < deadline
            time.sleep(0.01)
        one.matched(Request("e", PROMPT))
        assert one.scheduler.take_stats() == {"lookups.detached": 1}


def test_the_hints_of_a_request_reach_its_chunks() -> None:
    """The first block is retained, at the store and again at the next lookup; actions are counted."""
    with Node(workers=0, arena_bytes="8MiB") as node, closing(Vllm(node, "hinted")) as one:
        directives = [{"end": BLOCK_TOKENS, "priority": 50, "duration": 600}]
        actions = [
            SimpleNamespace(action_type="kv.retain", action_version="1.0", payload={"directives": directives}),
            SimpleNamespace(action_type="kv.fetch", action_version="1.0", payload={}),
            SimpleNamespace(action_type="kv.share", action_version="1.0", payload={}),
        ]
        before = node.cache_stats().retained_bytes
        first = Request("a", PROMPT, kv_hints=SimpleNamespace(actions=actions))
        assert one.matched(first) == (0, False)
        one.compute(first, [0, 1, 2, 3, 4])
        stats = one.scheduler.take_stats()
        assert (stats["applied_hints"], stats["ignored_hints"]) == (2, 1)
        retained = node.cache_stats().retained_bytes - before
        assert 0 < retained < len(one.payload(0, [0, 1, 2, 3])) / 3
        whole = [{"priority": 50, "duration": 600}]
        actions[0] = SimpleNamespace(action_type="kv.retain", action_version="1.0", payload={"directives": whole})
        again = Request("b", PROMPT, kv_hints=SimpleNamespace(actions=actions))
        assert one.matched(again) == (WHOLE, True)
        assert node.cache_stats().retained_bytes - before == 4 * retained


def test_a_load_has_the_hints_of_its_request(node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Match without them is a use of normal priority, and raises the priority of the chunks."""
    one, matches, match = start(engines, node, "low"), [], Session.match
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])

    def recorded(session: Session, request: pb.MatchRequest, timeout: float) -> Any:
        matches.append((request.low_priority, [kept.retain_seconds for kept in request.retained]))
        return match(session, request, timeout)

    monkeypatch.setattr(Session, "match", recorded)
    for name, directives, expected in (
        ("b", [{"priority": 0}], (True, [])),
        ("c", [{"priority": 50, "duration": 600}], (False, [600])),
    ):
        retain = SimpleNamespace(action_type="kv.retain", action_version="1.0", payload={"directives": directives})
        request = Request(name, PROMPT, kv_hints=SimpleNamespace(actions=[retain]))
        assert one.matched(request) == (WHOLE, True)
        one.allocated(request, [4, 3, 2, 1], WHOLE)
        one.step()
        one.wait(set(), {name})
        assert matches == [expected] * 2, "the lookup's and the load's"
        matches.clear()


def test_a_lookup_that_fails_finds_nothing(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = start(engines, node, "fails")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])

    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(one.scheduler, "_match", fails)
    request = Request("b", PROMPT)
    with caplog.at_level(logging.WARNING):
        assert one.matched(request) == (0, False)
    assert "looking a prompt up failed, computing instead: planted" in caplog.text
    one.allocated(request, [0, 1, 2, 3, 4], 0)


def test_the_lookups_of_a_step_are_waited_for_together(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start(engines, node, "waits")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    real, patience, go = scheduler_connector.wait, [], threading.Event()

    def waiting(futures: Any, seconds: float) -> None:
        patience.append(seconds)
        real(futures, seconds)

    monkeypatch.setattr(scheduler_connector, "wait", waiting)
    monkeypatch.setattr(one.scheduler, "_match", lambda *_: go.wait(10) and None)
    try:
        for name in "bcd":
            one.scheduler.get_num_new_matched_tokens(Request(name, PROMPT), 0)
        one.step()
        one.scheduler.get_num_new_matched_tokens(Request("e", PROMPT), 0)
    finally:
        go.set()
    assert patience[0] == patience[3] == scheduler_connector._MAX_LOOKUP_SECONDS
    assert max(patience[1:3]) < patience[0] / 2


def test_a_request_without_blocks_gives_its_leases_back_after_a_while_and_looks_again(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start(engines, node, "holds")
    one.compute(Request("a", PROMPT), [0, 1, 2, 3, 4])
    until_no_lease(node)
    clock, real = 0.0, time.monotonic
    for module in (scheduler_connector, pending_lookup):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: real() + clock))
    go, match = threading.Event(), PrefixLookup.match

    def late(*arguments: Any, **options: Any) -> Any:
        assert go.wait(10)
        return match(*arguments, **options)

    monkeypatch.setattr(PrefixLookup, "match", late)
    waiting = Request("b", PROMPT)
    assert one.scheduler.get_num_new_matched_tokens(waiting, 0) == (None, False)
    clock = 60.0  # a disk that took its time
    go.set()
    assert one.matched(waiting) == (WHOLE, True)
    held = one.scheduler._requests["b"].lookup
    one.step()
    assert one.scheduler._requests["b"].lookup is held, "the hold begins with the answer"
    assert node.cache_stats().leases == 1
    clock = 120.0
    one.step()
    until_no_lease(node)
    assert one.matched(waiting) == (WHOLE, True)
    one.allocated(waiting, [4, 3, 2, 1], WHOLE)
    clock = 180.0
    one.scheduler.build_connector_meta(SimpleNamespace(preempted_req_ids=(), num_scheduled_tokens={}))
    assert node.cache_stats().leases == 1, "what is loading is kept"


def test_an_excluded_prompt_that_waits_for_blocks_is_looked_up_again_only_after_a_while(
    node: Node, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks in each step; the daemon counts the miss once, and later chunks are found."""
    one, clock, real = start(engines, node, "excluded"), 0.0, time.monotonic
    for module in (scheduler_connector, pending_lookup):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: real() + clock))
    misses = SimpleQueue[Any]()
    monkeypatch.setattr(PrefixLookup, "count_miss", lambda *arguments: misses.put(arguments))
    waiting = Request("a", PROMPT)
    for _ in range(3):
        assert one.matched(waiting) == (0, False)
        one.step()
    assert one.scheduler.take_stats()["lookups.skipped"] == 1
    misses.get(timeout=10)
    assert misses.empty()
    one.compute(Request("b", PROMPT), [0, 1, 2, 3, 4])
    clock = 60.0
    one.step()
    assert one.matched(waiting) == (WHOLE, True)


def test_an_adapters_files_are_read_while_the_scheduler_continues(
    node: Node, engines: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=str(tmp_path))
    one, go, digest = start(engines, node, "reads"), threading.Event(), hashlib.file_digest

    def late(*arguments: Any) -> Any:
        assert go.wait(10)
        return digest(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", late)
    first = Request("a", PROMPT, lora_request=lora)
    try:
        for _ in range(2):
            assert one.scheduler.get_num_new_matched_tokens(first, 0) == (None, False)
        assert one.matched(Request("b", PROMPT)) == (0, False), "others do not wait"
        unread = Request("c", PROMPT, lora_request=lora)
        one.allocated(unread, [0, 1, 2, 3, 4], 0)  # vLLM does so if the request may not read caches
        assert not one.step({"c": (unread, len(PROMPT), [0, 1, 2, 3, 4])}).stores
    finally:
        go.set()
    assert one.matched(first) == (0, False)
    one.compute(first, [0, 1, 2, 3, 4])
    assert one.matched(Request("d", PROMPT, lora_request=lora)) == (WHOLE, True)
    assert one.matched(Request("e", PROMPT)) == (0, False)


def test_an_adapter_that_cannot_be_identified_is_said_once(
    node: Node, engines: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = start(engines, node, "adapter")
    lora = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            assert one.matched(Request(name, PROMPT, lora_request=lora)) == (0, False)
    assert caplog.text.count("the LoRA adapter l has no weights at") == 1


def test_while_an_adapter_is_loaded_again_its_requests_are_not_cached(
    node: Node, engines: ExitStack, tmp_path: Path
) -> None:
    """vLLM then computes with either folder's weights."""
    one, loras = start(engines, node, "loaded again"), []
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "adapter_model.safetensors").write_text(version)
        path = str(tmp_path / version)
        loras.append(SimpleNamespace(lora_name="l", lora_int_id=1, lora_path=path, load_inplace=True))
    old, new = Request("old", PROMPT, lora_request=loras[0]), Request("new", PROMPT, lora_request=loras[1])
    for request in (old, new):
        assert one.matched(request) == (0, False)
    for request in (old, new):
        one.compute(request, [0, 1, 2, 3, 4])
    for lora in loras:
        request, later = (Request(f"{name} {lora.lora_path}", PROMPT, lora_request=lora) for name in ("again", "later"))
        assert one.matched(request) == (0, False), "nothing was stored"
        one.compute(request, [0, 1, 2, 3, 4])
        assert one.matched(later) == (WHOLE, True)
        assert not one.scheduler.request_finished(later, [])
