"""The cache is never a reason to fail a request."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.condition_wait import until
from benchmarks.node import Node
from tests.inference_svc.engine.test_exactness import prompt

# No sequence stays in the worker's pool, so all cached tokens come from the daemon. A busy machine causes no miss.
FLAGS = {"resident_sequences": 0, "cache_timeout_ms": 20_000}


@pytest.fixture(scope="module")
def shaky() -> Iterator[Node]:
    flags = {"heartbeat_ms": 20_000}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=FLAGS, daemon_flags=flags) as node:
        yield node


def ask(node: Node, ids: list[int]) -> tuple[list[int], int, float]:
    began = time.monotonic()
    result = node.client().generate(ids, max_tokens=8, temperature=0, ignore_eos=True, deadline=30)
    return result.token_ids, result.cached_tokens, time.monotonic() - began


def ask_until_loaded(node: Node, ids: list[int], want: list[int]) -> None:
    """Ask again until the daemon's chunks are loaded, because with short timeouts a busy machine causes misses."""

    def loaded() -> bool:
        got, cached, _ = ask(node, ids)
        assert got == want
        return cached == len(ids) - 1

    until(loaded)


def test_without_a_daemon_requests_are_computed() -> None:
    with Node("demo", workers=0, worker_flags=FLAGS) as node:
        node.kill("daemon")
        node.workers = 1
        node.start_worker(0)
        ids = prompt(1, 150)
        first, cached, _ = ask(node, ids)
        assert cached == 0
        node.start_daemon()
        node.wait_attached(0)
        assert ask(node, ids)[0] == first
        node.settle()
        again, cached, _ = ask(node, ids)
        assert again == first
        assert cached == 149


def test_a_killed_daemon_costs_nothing_but_the_cache(shaky: Node) -> None:
    ids = prompt(2, 150)
    want, _, _ = ask(shaky, ids)
    shaky.settle()
    shaky.kill("daemon")
    got, cached, seconds = ask(shaky, ids)
    assert got == want
    assert seconds < 5
    shaky.start_daemon()
    shaky.wait_attached(0)
    got, cached, _ = ask(shaky, ids)
    assert (got, cached) == (want, 149)


def test_dead_daemons_leave_no_memory_behind(shaky: Node) -> None:
    for _ in range(3):
        ask(shaky, prompt(7, 150))
        shaky.settle()
        shaky.restart_daemon()
    ask(shaky, prompt(7, 150))
    maps = Path(f"/proc/{shaky.pid('worker-0')}/maps").read_text().splitlines()
    for kind in ("arena", "summary", "staging"):
        mapped = {line.split(None, 5)[4] for line in maps if f"/memfd:kvsidecar-{kind}" in line}
        assert len(mapped) == 1, f"{len(mapped)} daemons' {kind} is mapped"


def test_a_hanging_daemon_delays_one_request_by_its_timeout(shaky: Node) -> None:
    prompts = [prompt(30 + i, 150) for i in range(3)]
    want = [ask(shaky, ids)[0] for ids in prompts]
    shaky.settle()
    shaky.kill("worker-0")
    shaky.start_worker(0, cache_timeout_ms=200)
    shaky.kill("daemon", signal.SIGSTOP)
    try:
        got = [ask(shaky, ids)[0] for ids in prompts]
    finally:
        shaky.kill("daemon", signal.SIGCONT)
    assert got == want
    assert shaky.client().stats().cache_failures == 1, "the next ones do not wait"
    shaky.wait_attached(0)
    ask_until_loaded(shaky, prompts[0], want[0])
    shaky.restart_worker(0)  # with the module's timeout


def test_a_worker_that_hangs_loses_its_session_and_comes_back() -> None:
    flags = {"heartbeat_ms": 500}
    with Node("demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=FLAGS, daemon_flags=flags) as node:
        ids = prompt(4, 150)
        want, _, _ = ask(node, ids)
        node.settle()
        node.kill("worker-0", signal.SIGSTOP)
        until(lambda: not node.cache_stats().sessions)
        node.kill("worker-0", signal.SIGCONT)
        got, _, _ = ask(node, ids)
        assert got == want
        node.wait_attached(0)
        ask_until_loaded(node, ids, want)


def test_a_killed_worker_leaves_no_lease_behind(shaky: Node) -> None:
    stream = shaky.client().stream(prompt(5, 400), max_tokens=200, ignore_eos=True)
    next(stream)
    shaky.restart_worker(0)
    until(lambda: not (stats := shaky.cache_stats()).leases and not stats.reservations)
    assert ask(shaky, prompt(5, 400))[0]


def test_a_small_arena_refuses_chunks_but_no_request() -> None:
    with Node("demo", arena_bytes="1MiB", durable=False, pool_bytes="64MiB") as node:
        for i in range(6):
            tokens, _, _ = ask(node, prompt(20 + i, 600))
            assert len(tokens) == 8
        node.settle()
        until(lambda: (stats := node.client().stats()).pool_free_pages == stats.pool_pages)
        assert node.client().stats().cache_failures == 0


def test_sigterm_ends_a_worker_gracefully(shaky: Node) -> None:
    stream = shaky.client().stream(prompt(6, 50), max_tokens=60, ignore_eos=True)
    next(stream)
    process = shaky._processes["worker-0"]
    process.send_signal(signal.SIGTERM)
    parts = list(stream)
    assert parts[-1].final is not None, "a running request ends before the worker does"
    assert process.wait(20) == 0
    del shaky._processes["worker-0"]
    shaky.start_worker(0)
