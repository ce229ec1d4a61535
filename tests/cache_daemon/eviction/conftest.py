"""Entries of eviction policies, and a tier whose entries have no parents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from benchmarks.eviction_policies import POLICIES
from cache_daemon.eviction import EvictionPolicy

NewPolicy = Callable[[], EvictionPolicy]


@dataclass(eq=False, slots=True)
class Item:
    """An entry whose name is a number."""

    number: int
    size_bytes: int = 1000
    tokens: int = 128
    start_position: int = 0
    prefill_seconds: float = 0.0

    @property
    def key(self) -> bytes:
        return (self.number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") * 4


@pytest.fixture(params=list(POLICIES))
def new_policy(request: pytest.FixtureRequest) -> NewPolicy:
    return POLICIES[request.param]


def hits(policy: EvictionPolicy, requests: Iterable[int], capacity: int) -> int:
    """Return the number of requests that are hits in a tier of ``capacity`` equal entries."""
    here: dict[int, Item] = {}
    found = 0
    for number in requests:
        if number in here:
            found += 1
            policy.touch(here[number])
            continue
        item = Item(number)
        if len(here) == capacity:
            if not policy.admit(item):
                continue
            victim = next(policy.victims())
            assert isinstance(victim, Item)
            policy.remove(victim)
            del here[victim.number]
        policy.insert(item)
        here[number] = item
    return found
