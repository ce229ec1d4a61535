"""What holds of every policy, whatever a tier does and in whatever order."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import eviction_replay
from benchmarks.eviction_policies import POLICIES
from benchmarks.eviction_traces import Block, read
from cache_daemon.eviction import Entry, EvictionPolicy, Gittins
from tests.cache_daemon.eviction.conftest import Item, NewPolicy

# What a tier may do to one of eight keys.
moves = st.lists(
    st.tuples(st.sampled_from(["come", "come", "touch", "park", "make_evictable", "leave"]), st.integers(0, 7)),
    max_size=120,
)


class Tier:
    """Makes the moves that are valid for a policy, and tracks the entries in the tier."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.here: dict[int, Item] = {}
        self.unevictable: set[int] = set()

    def do(self, move: str, number: int) -> None:
        item = self.here.get(number)
        if item is None:
            if move == "come":
                self.come(Item(number, size_bytes=1 + number % 3))
        elif move == "touch":
            self.policy.touch(item)
        elif move == "park" and number not in self.unevictable:
            self.policy.make_unevictable(item)
            self.unevictable.add(number)
        elif move == "make_evictable" and number in self.unevictable:
            self.policy.make_evictable(item)
            self.unevictable.discard(number)
        elif move == "leave":
            self.policy.remove(self.here.pop(number))
            self.unevictable.discard(number)

    def come(self, item: Item) -> None:
        parent = self.here.get(item.number // 2)
        if self.policy.admit(item, parent) or item.number % 2:  # a tier that is not full does not ask
            self.policy.insert(item, parent)
            self.here[item.number] = item


@given(moves)
@settings(deadline=None)
@pytest.mark.parametrize("name", POLICIES)
def test_offers_each_entry_that_is_in_and_not_parked_once(name: str, moves: list[tuple[str, int]]) -> None:
    tier = Tier(POLICIES[name]())
    for move in moves:
        tier.do(*move)
        offered = list(tier.policy.victims())
        expected = {item for number, item in tier.here.items() if number not in tier.unevictable}
        assert len(offered) == len(expected)
        assert set(offered) == expected
        assert len(tier.policy) == len(tier.here)
        if isinstance(tier.policy, Gittins):
            tier.policy.check_integrity()


@given(moves)
@settings(deadline=None)
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_calls_give_the_same_order(name: str, moves: list[tuple[str, int]]) -> None:
    tiers = [Tier(POLICIES[name]()), Tier(POLICIES[name]())]
    for move in moves:
        for tier in tiers:
            tier.do(*move)
        first, second = ([i.number for i in t.policy.victims() if isinstance(i, Item)] for t in tiers)
        assert first == second


@given(moves, st.integers(0, 7))
@settings(deadline=None)
@pytest.mark.parametrize("name", ["lru", "lfu", "gdsf"])
def test_parking_changes_no_place(name: str, moves: list[tuple[str, int]], number: int) -> None:
    tier = Tier(POLICIES[name]())
    for move in moves:
        tier.do(*move)
    before = list(tier.policy.victims())
    tier.do("park", number)
    tier.do("make_evictable", number)
    if number in tier.here and tier.here[number] in before:
        assert list(tier.policy.victims()) == before


def test_what_is_used_while_it_is_parked_counts(new_policy: NewPolicy) -> None:
    policy = new_policy()
    used, unused = Item(0), Item(1)
    policy.insert(used)
    policy.insert(unused)
    policy.make_unevictable(used)
    for _ in range(3):
        policy.touch(used)
    policy.make_evictable(used)
    assert next(policy.victims()) is unused


def test_a_successor_of_the_same_key_is_its_own(new_policy: NewPolicy) -> None:
    policy = new_policy()
    doomed, successor = Item(5), Item(5)
    policy.insert(doomed)
    policy.insert(successor)
    policy.remove(doomed)
    assert list(policy.victims()) == [successor]
    policy.touch(successor)
    policy.remove(successor)
    assert list(policy.victims()) == []


@pytest.mark.parametrize("call", ["touch", "make_unevictable", "make_evictable", "remove"])
def test_refuses_what_is_not_in(new_policy: NewPolicy, call: str) -> None:
    with pytest.raises(KeyError):
        getattr(new_policy(), call)(Item(0))


def test_refuses_to_do_things_twice(new_policy: NewPolicy) -> None:
    policy, item = new_policy(), Item(0)
    policy.insert(item)
    with pytest.raises(KeyError, match="in the tier already"):
        policy.insert(item)
    policy.make_unevictable(item)
    with pytest.raises(KeyError, match="unevictable already"):
        policy.make_unevictable(item)
    policy.make_evictable(item)
    with pytest.raises(KeyError, match="not unevictable"):
        policy.make_evictable(item)
    policy.remove(item)
    with pytest.raises(KeyError):
        policy.remove(item)


def test_gives_up_children_before_their_parents(new_policy: NewPolicy) -> None:
    class Watched:
        """Wraps a policy, and checks every removed entry."""

        def __init__(self) -> None:
            self.policy = new_policy()
            self.removed = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.policy, name)

        def remove(self, entry: Entry) -> None:
            assert isinstance(entry, Block)
            assert not tier.blocks[entry], "a parent went before its child"
            self.removed += 1
            self.policy.remove(entry)

    watched = Watched()
    tier = eviction_replay.Tier(watched, 200)  # type: ignore[arg-type]
    for request in read("agents:3", 300):
        tier.serve(request)
    assert watched.removed > 100


def test_finds_a_victim_at_once_among_many_parents(new_policy: NewPolicy) -> None:
    policy = new_policy()
    items = [Item(i) for i in range(100_000)]
    for parent, item in zip([None, *items], items, strict=False):
        policy.insert(item, parent)
        if parent is not None:
            policy.make_unevictable(parent)

    def seconds() -> float:
        began = time.thread_time()
        for _ in range(100):
            assert next(policy.victims()) is items[-1]
        return (time.thread_time() - began) / 100

    assert min(seconds() for _ in range(5)) < 1e-3, "looking for one took longer than 1 ms; past all parents, it is 10"


def test_the_default_is_known_by_its_name() -> None:
    from cache_daemon.eviction import DEFAULT

    assert isinstance(POLICIES[DEFAULT](), Gittins)
