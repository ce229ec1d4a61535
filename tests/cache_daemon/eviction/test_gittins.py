"""The default policy, and what it learns from."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_daemon.eviction import Gittins, LeastRecentlyUsed
from cache_daemon.eviction.ghost_list import MAX_NOTE, GhostList
from cache_daemon.eviction.reuse_stats import AGES, ReuseStats
from tests.cache_daemon.eviction.conftest import Item, hits

# ---- the policy -----------------------------------------------------------------------------------------------------


def test_keeps_a_part_of_what_returns_too_late_for_all_of_it() -> None:
    rounds = list(itertools.islice(itertools.cycle(range(150)), 9000))
    assert hits(LeastRecentlyUsed(), rounds, 100) == 0
    assert hits(Gittins(), rounds, 100) > 0.5 * len(rounds)


def test_one_off_entries_do_not_push_out_what_comes_back() -> None:
    requests = [i // 3 % 80 if i % 3 == 0 else 1000 + i for i in range(12_000)]
    assert hits(LeastRecentlyUsed(), requests, 100) == 0
    assert hits(Gittins(), requests, 100) > 0.8 * len(requests) / 3


def test_follows_when_other_entries_become_popular() -> None:
    rng = random.Random(1)
    weights = [(i + 1) ** -1.0 for i in range(1000)]
    requests = [n + 5000 * (i // 5000) for i, n in enumerate(rng.choices(range(1000), weights, k=15_000))]
    ours, lru = hits(Gittins(), requests, 100), hits(LeastRecentlyUsed(), requests, 100)
    assert ours > lru


def test_begins_as_lru_does() -> None:
    policy = Gittins()
    items = [Item(i) for i in range(8)]
    for item in items:
        policy.insert(item)
    policy.touch(items[0])
    assert next(policy.victims()) is not items[0]
    assert list(policy.victims())[-1] is items[0]


def test_refuses_the_child_of_what_was_refused() -> None:
    policy = Gittins()
    assert not policy.admit(Item(1), parent=Item(0))


def test_gives_up_what_was_cheap_to_compute_first() -> None:
    policy = Gittins()
    dear, cheap = Item(0, prefill_seconds=2.0), Item(1, prefill_seconds=0.1)
    policy.insert(dear)
    policy.insert(cheap)
    assert next(policy.victims()) is cheap


def test_gives_up_what_was_unused_before_a_restart_first() -> None:
    policy = Gittins()
    popular, unpopular = Item(0), Item(1)
    policy.insert(popular, uses=20)
    policy.insert(unpopular)
    assert next(policy.victims()) is unpopular


def test_remembers_uses_of_what_had_gone() -> None:
    policy = Gittins()
    old, new = Item(0), Item(1)
    policy.insert(old)
    for _ in range(5):
        policy.touch(old)
    policy.remove(old)
    again = Item(0)
    policy.insert(again)
    policy.insert(new)
    assert next(policy.victims()) is new


# ---- reuse times ----------------------------------------------------------------------------------------------------


def lived(ages: list[int], count: int = 2000, kinds: int = 2) -> ReuseStats:
    """Kind 0 as it is when ``count`` entries a slice begin to wait, each used at one of ``ages`` in turn."""
    times = ReuseStats([[0] * kinds, list(range(kinds))], np.full((kinds, AGES), 0.02))
    due: dict[int, list[int]] = {}
    for now in range(4 * AGES):
        for i in range(count):
            times.start_wait(0)
            due.setdefault(now + ages[i % len(ages)], []).append(now)
        for began in due.pop(now, []):
            times.record_reuse(0, now - began)
        times.advance_slice()
    return times


def test_a_steady_rate_promises_itself_at_every_age() -> None:
    times = ReuseStats([[0]], np.full((1, AGES), 0.05))
    assert times.gittins_index() == pytest.approx(np.full((1, AGES), 0.05), rel=0.03)


def test_what_is_used_at_one_age_promises_more_the_nearer_that_is() -> None:
    gittins_index = lived([10], count=50).gittins_index()[0]
    assert np.all(np.diff(gittins_index[:10]) > 0)
    assert gittins_index[9] > 5 * gittins_index[0]
    assert gittins_index[0] == pytest.approx(1 / 10, rel=0.2)
    assert gittins_index[20] < gittins_index[0] / 3


def test_an_unknown_kind_is_taken_to_be_like_the_others() -> None:
    gittins_index = lived([10], count=50).gittins_index()
    assert gittins_index[1, :10] == pytest.approx(gittins_index[0, :10], rel=0.5)


def test_longer_slices_change_no_rate_per_time() -> None:
    times = lived([20, 30], count=50)
    before = times.gittins_index()[0]
    times.double_slice()
    after = times.gittins_index()[0]
    assert after[2] / 2 == pytest.approx(before[4], rel=0.1)


# ---- ghosts ---------------------------------------------------------------------------------------------------------

keys = st.integers(0, 15).map(lambda n: Item(n).key)


@given(st.lists(st.tuples(keys, st.integers(0, MAX_NOTE), st.booleans()), max_size=60))
def test_a_ghost_is_as_it_was_put_until_it_is_taken_or_makes_room(calls: list[tuple[bytes, int, bool]]) -> None:
    ghosts, model = GhostList(8), {}
    for tick, (key, note, forget) in enumerate(calls, 1):
        assert ghosts.take(key) == model.pop(key, None)
        if not forget:
            lost = ghosts.put(key, tick, note)
            if lost is not None:
                model = {k: v for k, v in model.items() if v != lost}
            model[key] = tick, note
        assert sorted(ghosts) == sorted(model.values())


def test_the_oldest_of_a_bucket_makes_room() -> None:
    ghosts = GhostList(4)
    for tick in range(1, 5):
        assert ghosts.put(Item(tick).key, tick, 0) is None
    assert ghosts.put(Item(5).key, 5, 0) == (1, 0)


def test_ghosts_hold_ticks_of_years() -> None:
    ghosts = GhostList(4)
    ghosts.put(Item(0).key, (1 << 38) - 1, MAX_NOTE)
    assert ghosts.take(Item(0).key) == ((1 << 38) - 1, MAX_NOTE)
