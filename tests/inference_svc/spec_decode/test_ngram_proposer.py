"""When the daemon is asked for a prompt, and when it need not be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.kv_client.chunk_loader import ChunkLoader
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from tests.cache_daemon.conftest import descriptor
from tests.inference_svc import windowed
from tests.inference_svc.engine.test_exactness import prompt


@pytest.fixture(scope="module")
def pair() -> Iterator[Node]:
    """Two workers, of which the second has nothing in its pool that the first computed."""
    with Node("demo", workers=2, pool_bytes="64MiB", daemon_flags={"heartbeat_ms": 1000}) as node:
        yield node


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_an_unknown_prompt_costs_no_call_and_is_counted(pair: Node) -> None:
    before = pair.cache_stats()
    result = pair.client().generate(prompt(41, 150), max_tokens=1)
    assert (result.cached_tokens, result.timings["lookup_ms"]) == (0, 0)
    assert eventually(lambda: pair.cache_stats().matches == before.matches + 1)
    assert pair.cache_stats().requested_tokens == before.requested_tokens + 150


def test_what_another_worker_stored_is_found_at_once(pair: Node) -> None:
    for seed in range(50, 60):
        pair.client(0).warm(prompt(seed, 40))
        found = pair.client(1).generate(prompt(seed, 40), max_tokens=1)
        assert found.cached_tokens == 39
        assert found.timings["lookup_ms"] > 0


def test_what_was_just_answered_is_found_although_it_is_still_being_stored(pair: Node) -> None:
    client = pair.client()
    for seed in range(100, 120):
        client.generate(prompt(seed, 15), max_tokens=1)
        assert client.generate(prompt(seed, 15), max_tokens=1).cached_tokens == 14


def test_a_prompt_shorter_than_the_summary_tells_is_found(pair: Node) -> None:
    pair.client(0).warm(prompt(70, 30))
    assert pair.client(1).generate(prompt(70, 30)[:5], max_tokens=1).cached_tokens == 4


def test_a_worker_that_cannot_map_the_summary_asks(pair: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> memoryview:
        raise PermissionError("not in this container")

    monkeypatch.setattr("kvsidecar.kv_transfer.daemon_connection.map_summary", refuse)
    link = DaemonConnection(ServiceAddress(pair.cache_socket), "blind", descriptor())
    assert link.wait(30)
    session = link.session
    assert session is not None
    assert session.may_contain(link.namespace, prompt(80, 20))
    assert session.may_contain_content(link.namespace, prompt(80, 20))
    link.close()


def test_prompts_are_kept_from_slow_loads_and_counted_until_there_is_another_daemon(pair: Node) -> None:
    writer, reader = windowed.windowed(node=pair), windowed.windowed(node=pair)
    cache = reader.cache
    assert cache is not None
    for seed in (90, 91, 92):
        writer.answer(windowed.prompt(seed, 200), length=1)
    assert reader.answer(windowed.prompt(90, 200), length=1)[1] > 0
    cache._cost_model.record_prefill(1000, 0.1)
    for _ in range(3):
        cache._cost_model.record_load(1000, 60.0)
    assert reader.answer(windowed.prompt(91, 200), length=1)[1] == 0
    assert cache.stats.bypassed == 1
    pair.settle()
    pair.restart_daemon()
    epoch = cache._epoch
    assert eventually(lambda: cache.attached and all(link.session.epoch != epoch for link in cache._daemons.values()))
    assert reader.answer(windowed.prompt(92, 200), length=1)[1] > 0
    assert cache.stats.bypassed == 1
    for one in (writer, reader):
        one.close()


def test_an_answer_with_a_gap_is_refused() -> None:
    """What does not continue the prefix is another text's."""
    matches = [pb.ChunkMatch(start_position=0, matched_tokens=4), pb.ChunkMatch(start_position=5, matched_tokens=4)]
    sequence: Any = None  # is not looked at before
    with pytest.raises(ValueError, match="does not continue 4 tokens"):
        ChunkLoader._plan_window(sequence, sequence, pb.MatchResponse(matches=matches), StoredPrefix())
