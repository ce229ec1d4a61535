"""Retention of the prefix that a stored chunk continues."""

from __future__ import annotations

from kvsidecar.cache.v1 import cache_pb2 as pb

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store.prompt_hints import NO_HINTS
from tests.cache_daemon.store.test_retention import SLOT, flood, known, put, retain
from tests.cache_daemon.stores import opened


async def test_a_stored_continuation_retains_and_renews_its_prefix() -> None:
    """A worker's pool serves a short turn without a Match, so only the Reserve names the retention of the prefix."""
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT) as bench:
        path = [await put(bench, [1, 2])]
        for turn in range(3):
            path.append(await put(bench, [10 + turn], retain(bench, 100), 2 + turn, path[-1]))
            assert all(bench.store.find(bench.root(), key).is_retained for key in path)
            bench.clock.now += 60
        await put(bench, [12], retain(bench, 100), 4, path[-2])  # it is stored already
        bench.clock.now += 60
        await bench.store.sweep()
        await flood(bench)
        assert known(bench, [1, 2, 10, 11, 12]) == 5


async def test_a_stored_continuation_retains_no_more_of_its_prefix_than_named() -> None:
    async with opened() as bench:
        path = [b""]
        for i in range(3):
            path.append(await put(bench, [i], NO_HINTS, i, path[-1]))
        await put(bench, [3], retain(bench, 100, end=2), 3, path[-1])
        assert [bench.store.find(bench.root(), key).is_retained for key in path[1:]] == [True, True, False]


async def test_a_quota_goes_to_the_beginning_of_a_continued_prefix_first() -> None:
    async with opened(limits={b"a": TenantLimits(pin_bytes=2 * 20 * 128)}) as bench:
        path = [b""]
        for i in range(4):
            path.append(await put(bench, [i] * 20, NO_HINTS, i * 20, path[-1], salt=b"a"))
        await put(bench, [3] * 20, retain(bench, 3600), 60, path[-2], salt=b"a")
        retained = [bench.store.find(bench.root(b"a"), key).is_retained for key in path[1:]]
        assert retained == [True, True, False, False]


async def test_a_reserve_of_a_chunk_in_progress_retains_its_prefix() -> None:
    async with opened() as bench:
        parent = await put(bench, [1, 2])
        header = bench.header([3], 2, parent)
        (reserved,) = bench.store.reserve(bench.session, b"", [header])
        (other,) = bench.store.reserve(bench.open(), b"", [header], retain(bench, 100))
        assert other.outcome == pb.RESERVE_OUTCOME_IN_PROGRESS
        assert bench.store.find(bench.root(), parent).is_retained
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, [3])])
