"""The textbook policies against libcachesim, on requests that depend on nothing before them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.eviction_policies import POLICIES
from tests.cache_daemon.eviction.conftest import hits

libcachesim = pytest.importorskip("libcachesim", reason="the oracle is not installed: pip install libcachesim")

# Ties and the moment at which a queue is looked at differ; LRU leaves no choice.
TOLERANCE = {"lru": 0.0, "lfu": 0.01, "s3fifo": 0.01, "gdsf": 0.01}
ORACLES = {"lru": "LRU", "lfu": "LFU", "s3fifo": "S3FIFO", "gdsf": "GDSF"}


def zipf(seed: int) -> list[int]:
    rng = random.Random(seed)
    return rng.choices(range(2000), weights=[(i + 1) ** -0.8 for i in range(2000)], k=30_000)


def shifting(seed: int) -> list[int]:
    """The popular ones are others every 5,000 requests, and one-off ones come between."""
    out = []
    for i, number in enumerate(zipf(seed)):
        out.append(number + i // 5000 * 500 if i % 4 else 100_000 + i)
    return out


def oracle_hits(name: str, requests: Sequence[int], capacity: int) -> int:
    cache = getattr(libcachesim, ORACLES[name])(cache_size=capacity)
    found = 0
    for number in requests:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = number + 1, 1
        found += cache.get(request)
    return found


@pytest.mark.parametrize("requests", [zipf(1), shifting(2)], ids=["zipf", "shifting"])
@pytest.mark.parametrize("capacity", [50, 300])
@pytest.mark.parametrize("name", ORACLES)
def test_hits_as_often_as_the_oracle(name: str, capacity: int, requests: list[int]) -> None:
    ours = hits(POLICIES[name](), requests, capacity) / len(requests)
    theirs = oracle_hits(name, requests, capacity) / len(requests)
    assert abs(ours - theirs) <= TOLERANCE[name], f"{name} hits {ours:.4f}, the oracle {theirs:.4f}"
