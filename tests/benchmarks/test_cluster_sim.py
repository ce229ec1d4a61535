"""Fleet simulation: one node equals ``benchmarks.eviction``; more nodes differ as expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster_sim
from benchmarks.cluster_nodes import Fleet, MeasuredCosts, RemoteTier, RemoteWrite, Routing
from benchmarks.cluster_traces import Arrival, arrivals
from benchmarks.eviction_replay import replay
from benchmarks.eviction_traces import BLOCK_TOKENS, of_lines
from cache_daemon.eviction import DEFAULT, POLICIES

COSTS = MeasuredCosts(
    token_seconds=0.01, pair_seconds=0.0, load_seconds=0.0, fetch_seconds=0.001, round_trip_seconds=1.0, token_bytes=10
)
WHOLE = [(BLOCK_TOKENS * 2, [1, 2]), (BLOCK_TOKENS * 3, [1, 2, 3]), (BLOCK_TOKENS * 2, [1, 2])]


def spaced(seconds: float, lines: list[tuple[int, list[int]]] | None = None) -> list[Arrival]:
    return [Arrival(i * seconds, request) for i, request in enumerate(of_lines(lines or WHOLE))]


def simulated(
    nodes: int, routing: Routing, write: RemoteWrite | None = None, trace: list[Arrival] | None = None
) -> Any:
    remote = RemoteTier(write, COSTS.token_bytes) if write else None
    fleet = Fleet(nodes, 300, COSTS, remote, routing, seed=1)
    return fleet.run(trace or spaced(100.0), pace=1.0), remote


def test_one_node_is_what_the_eviction_benchmark_replays() -> None:
    trace = arrivals("synthetic:1", 400)
    found, _ = simulated(1, "prefix", trace=trace)
    ratio = replay([arrival.request for arrival in trace], POLICIES[DEFAULT](), 300)
    assert 0 < ratio < 1
    assert found.local_tokens / found.prompt_tokens == pytest.approx(ratio, rel=1e-9)


def test_time_is_waiting_loading_and_computing() -> None:
    alone, _ = simulated(1, "prefix")
    assert alone.ttft_seconds == pytest.approx([10.24, 5.12, 0.0])
    queued, _ = simulated(1, "prefix", trace=spaced(1.0))
    assert queued.ttft_seconds == pytest.approx([10.24, 9.24 + 5.12, 9.24 + 5.12 - 1.0])


def test_a_remote_tier_has_what_was_used_twice_or_all_or_nothing() -> None:
    lines = [(BLOCK_TOKENS, [1])] * 3

    def elsewhere(write: RemoteWrite) -> tuple[int, int]:
        """Three nodes, each of which gets the prompt once."""
        remote = RemoteTier(write, COSTS.token_bytes)
        tokens = 0
        for arrival in spaced(100.0, lines):
            tokens += Fleet(1, 300, COSTS, remote, "load", 1).run([arrival], 1.0).remote_tokens
        return tokens, remote.written_bytes

    assert elsewhere("never") == elsewhere("second-use") == (0, 0)
    assert elsewhere("all") == (2 * BLOCK_TOKENS, BLOCK_TOKENS * COSTS.token_bytes)


def test_what_is_quicker_computed_is_not_fetched() -> None:
    remote = RemoteTier("all", COSTS.token_bytes)
    slow = MeasuredCosts(0.01, 0.0, 0.0, 0.02, 1.0, COSTS.token_bytes)
    for arrival in spaced(100.0):
        assert Fleet(1, 300, slow, remote, "load", 1).run([arrival], 1.0).remote_tokens == 0
    assert remote.read_bytes == 0


@pytest.mark.parametrize("nodes", [4, 40])
def test_routing_by_prefix_keeps_what_many_nodes_would_lose(nodes: int) -> None:
    trace = [Arrival(i * 60.0, arrival.request) for i, arrival in enumerate(arrivals("agents:1", 300))]
    by_prefix, _ = simulated(nodes, "prefix", trace=trace)
    by_chance, _ = simulated(nodes, "random", trace=trace)
    shared, _ = simulated(nodes, "random", "all", trace=trace)
    missed = [found.prompt_tokens - found.local_tokens for found in (by_prefix, by_chance)]
    assert missed[1] > 2 * missed[0]
    assert by_prefix.copies < by_chance.copies
    assert shared.local_tokens + shared.remote_tokens > by_prefix.local_tokens * 0.9
    assert sum(by_prefix.ttft_seconds) < sum(by_chance.ttft_seconds)
    assert by_prefix.asked <= len(trace) * 16


def test_a_prompt_that_all_want_at_once_is_copied_instead_of_waited_for() -> None:
    trace = spaced(0.001, [(BLOCK_TOKENS * 2, [1, 2])] * 40)
    spread, _ = simulated(4, "prefix", trace=trace)
    waiting, _ = simulated(4, "owner", trace=trace)
    assert spread.copies > waiting.copies == 1.0


def test_conversations_are_read_from_sizes(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,1500,100\n"
        "2023-11-16 18:00:30.0000000,1700,50\n"
        "2023-11-16 18:00:40.0000000,1590,50\n"
        "2023-11-16 18:20:00.0000000,1800,50\n"
    )
    found = arrivals(str(file))
    first, second, other, late = (arrival.request for arrival in found)
    assert [arrival.seconds for arrival in found] == [0, 30, 40, 1200]
    assert second.path[:2] == first.path[:2]
    assert second.path[2] is not first.path[2], "the block that the first ended in goes on differently"
    assert not set(other.path) & {*first.path, *second.path}, "shorter than the prompt with its answer"
    assert not set(late.path) & {*first.path, *second.path, *other.path}, "too late"


def test_costs_are_those_that_were_measured(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"arm": "nocache", "context_tokens": n, "ttft_ms_p50": n * 2.0 + n * n / 1000} for n in (1000, 2000, 4000)
    ]
    rows.append({"arm": "exact", "context_tokens": 4000, "ttft_ms_p50": 1, "restore_ms": 40.0, "cached_tokens": 4000})
    file = tmp_path / "ttft.json"
    file.write_text(json.dumps({"rows": rows}))
    found = cluster_sim.costs_of([file], gbit=8.0, latency_ms=2.0, token_bytes=1000)
    assert found.compute(0, 3000) == pytest.approx(6.0 + 9.0)
    assert found.compute(1000, 1000) == pytest.approx(found.compute(0, 2000) - found.compute(0, 1000))
    assert (found.load_seconds, found.fetch_seconds) == pytest.approx((1e-5, 1.1e-5))
    assert found.fetch(1000) == pytest.approx(0.002 + 0.011)


def test_the_cost_of_fetching_is_that_of_the_link(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"arm": "nocache", "context_tokens": 1000, "ttft_ms_p50": 2000.0},
        {"arm": "local", "context_tokens": 1000, "ttft_ms_p50": 10.0},
        {"arm": "remote_warm", "context_tokens": 1000, "ttft_ms_p50": 500.0, "bytes": 7000, "link_gbit": 1.0},
        {"arm": "remote_warm", "context_tokens": 1000, "ttft_ms_p50": 100.0, "bytes": 5000, "link_gbit": 10.0},
    ]
    file = tmp_path / "fleet.json"
    file.write_text(json.dumps({"rows": rows}))
    found = cluster_sim.costs_of([file], gbit=10.0, latency_ms=2.0, token_bytes=1000)
    assert (found.fetch_seconds, found.token_bytes) == pytest.approx((1e-4, 5))
    with pytest.raises(SystemExit, match="--gbit 2: the rows of remote_warm have 1, 10"):
        cluster_sim.costs_of([file], gbit=2.0, latency_ms=2.0, token_bytes=1000)


def test_the_command_says_what_each_part_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_sim, "_QUICK_REQUESTS", 300)
    out = tmp_path / "cluster_sim.json"
    cluster_sim.main(["--quick", "--trace", "agents:1", "--nodes", "1", "4", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["rows"]) == 2 + 3 * 2
    assert found["summary"]["one_node_over_eviction_agents:1"] == 1.0
    assert found["summary"]["worth_of_routing_agents:1_4"] > 1
