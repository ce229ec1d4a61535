"""Trace replay, and the default policy is the best of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import eviction
from benchmarks.eviction_policies import POLICIES
from benchmarks.eviction_replay import belady, replay
from benchmarks.eviction_traces import KINDS, Request, read
from cache_daemon.eviction import DEFAULT, LeastRecentlyUsed


def trace(tmp_path: Path, *lines: tuple[int, list[int]]) -> list[Request]:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"input_length": n, "hash_ids": ids}) + "\n" for n, ids in lines))
    return read(str(file))


def test_counts_the_tokens_of_the_leading_blocks(tmp_path: Path) -> None:
    requests = trace(tmp_path, (1200, [1, 2, 3]), (1200, [1, 2, 3]), (1100, [1, 2, 4]), (600, [9, 10]))
    assert replay(requests, LeastRecentlyUsed(), 100) == pytest.approx((1200 + 1024) / 4100)
    assert belady(requests, 100) == pytest.approx((1200 + 1024) / 4100)


def test_a_request_does_not_evict_its_own_blocks(tmp_path: Path) -> None:
    requests = trace(tmp_path, (2048, [1, 2, 3, 4]), (2048, [1, 2, 3, 4]))
    assert replay(requests, LeastRecentlyUsed(), 3) == pytest.approx(1536 / 4096)


def test_the_bound_keeps_what_comes_next(tmp_path: Path) -> None:
    requests = trace(tmp_path, (512, [1]), (512, [2]), (512, [3]), (512, [1]), (512, [3]), (512, [2]))
    assert replay(requests, LeastRecentlyUsed(), 1) == 0
    assert belady(requests, 1) == pytest.approx(1 / 6)
    assert belady(requests, 2) == pytest.approx(2 / 6)


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_the_same_for_a_seed_and_others_for_another(kind: str) -> None:
    def ids(seed: int) -> list[tuple[int, list[bytes]]]:
        return [(r.tokens, [b.key for b in r.path]) for r in read(f"{kind}:{seed}", 50)]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_made_trace_have_one_context(kind: str) -> None:
    for request in read(f"{kind}:1", 200):
        assert sum(b.tokens for b in request.path) == request.tokens
        assert all(b.parent is a for a, b in zip((None, *request.path), request.path, strict=False))


@pytest.mark.parametrize("capacity", [300, 1000, 3000])
def test_the_default_is_the_best_policy_and_none_beats_the_bound(capacity: int) -> None:
    requests = read("synthetic:1", 1500)
    ratios = {name: replay(requests, new(), capacity) for name, new in POLICIES.items()}
    assert ratios[DEFAULT] >= max(ratios.values()) - 0.003
    assert max(ratios.values()) <= belady(requests, capacity)


def test_writes_a_row_for_each_policy_and_capacity(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n' * 2)
    eviction.main(["--trace", str(file), "--capacity-blocks", "1,2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["policy"], r["capacity_blocks"]) for r in rows] == [
        (p, c) for c in (1, 2) for p in [*POLICIES, "belady"]
    ]
    assert {r["policy"] for r in rows if r["default"]} == {DEFAULT}
    assert [r["token_hit_ratio"] for r in rows if r["policy"] == "lru"] == [round(512 / 1200, 4), 0.5]


def test_says_what_a_trace_may_be() -> None:
    with pytest.raises(SystemExit, match="synthetic:1"):
        eviction.main(["--trace", "nowhere.jsonl"])
