"""The store's promises, one at a time, over a durable tier that misbehaves."""

from __future__ import annotations

import asyncio
import time

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import ChunkNotFound, InvalidRequest, QuotaExceeded

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store.arena_evictor import ArenaEvictor
from cache_daemon.store.chunk import Residency
from cache_daemon.store.store_clock import WallClock
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import FakeClock, opened

SLOT = 4096


# ---- writing ------------------------------------------------------------------------------------------------


async def test_what_a_worker_writes_after_commit_changes_nothing() -> None:
    async with opened() as bench:
        reserved = bench.store.reserve(bench.session, b"", [bench.header([1, 2])])[0]
        item = bench.fill(reserved, [1, 2])
        assert bench.session.staging is not None
        assert reserved.staged is not None
        view = bench.session.staging.view(reserved.staged)
        await bench.store.commit(bench.session, bench.store.epoch, [item])
        view[:] = bytes(len(view))
        view.release()
        assert await bench.found([1, 2]) == 2


async def test_a_caller_that_goes_away_during_commit_leaves_a_whole_chunk() -> None:
    async with opened() as bench:
        reserved = bench.store.reserve(bench.session, b"", [bench.header([1, 2])])[0]
        item = bench.fill(reserved, [1, 2])
        committing = asyncio.create_task(bench.store.commit(bench.session, bench.store.epoch, [item]))
        await asyncio.sleep(0)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        bench.store.close_session(bench.session)
        bench.session = bench.open()
        for _ in range(100):
            if await bench.found([1, 2]):
                break
            await asyncio.sleep(0.01)
        assert await bench.found([1, 2]) == 2


async def test_a_chunk_larger_than_the_arena_is_refused_and_evicts_nothing() -> None:
    async with opened(arena_bytes=4 * SLOT, staging_bytes=64 * SLOT) as bench:
        for i in range(4):
            await bench.put([i])
        large = bench.header(list(range(200)))
        assert large.payload_bytes > 4 * SLOT
        assert bench.store.reserve(bench.session, b"", [large])[0].outcome == pb.RESERVE_OUTCOME_TOO_LARGE
        assert bench.store.stats().arena_evictions == 0


async def test_a_chunk_larger_than_the_durable_budget_evicts_nothing_from_disk() -> None:
    async with opened(arena_bytes=64 * SLOT, budget_bytes=3 * SLOT) as bench:
        await bench.put([1])
        await bench.store.settle()
        await bench.put([7] * 100)
        await bench.store.settle()
        stats = bench.store.stats()
        assert (stats.durable_chunks, stats.durable_evictions) == (1, 0)


async def test_a_chunk_larger_than_its_tenants_quota_evicts_nothing() -> None:
    limits = {b"a": TenantLimits(arena_bytes=8 * SLOT, store_bytes=4 * SLOT)}
    async with opened(arena_bytes=16 * SLOT, limits=limits) as bench:
        for i in range(2):
            key, _ = await bench.put([i], salt=b"a")
            await bench.store.settle()
        await bench.put(list(range(100, 200)), salt=b"a")  # 4 slots, and 5 with its header on disk
        await bench.store.settle()
        assert (bench.store.stats().arena_chunks, bench.store.stats().durable_chunks) == (3, 2)
        tenant = bench.store.find(bench.root(b"a"), key).tenant
        assert ArenaEvictor(bench.store.tiers).allocate(9 * SLOT, tenant) is None, "as after a smaller quota is read"
        assert bench.store.stats().arena_chunks == 3


async def test_commit_waits_for_the_disk_when_the_arena_is_full_of_what_is_being_written() -> None:
    async with opened(arena_bytes=2 * SLOT) as bench:
        bench.tier.hold()
        await bench.put([1])
        await bench.put([2])
        waiting = asyncio.create_task(bench.put([3]))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "nothing can go while it is being written"
        bench.tier.let_go()
        assert (await waiting)[1] == pb.COMMIT_OUTCOME_COMMITTED
        assert await bench.found([3]) == 1


async def test_a_commit_names_each_reservation_once() -> None:
    async with opened() as bench:
        reserved = bench.store.reserve(bench.session, b"", [bench.header([1])])[0]
        item = bench.fill(reserved, [1])
        with pytest.raises(InvalidRequest, match="named twice"):
            await bench.store.commit(bench.session, bench.store.epoch, [item, item])
        assert await bench.store.commit(bench.session, bench.store.epoch, [item]) == [pb.COMMIT_OUTCOME_COMMITTED]


async def test_one_bad_chunk_of_a_commit_takes_its_children_along_and_nobody_else() -> None:
    async with opened() as bench:
        headers = [bench.header([1]), bench.header([2])]
        first, other = bench.store.reserve(bench.session, b"", headers)
        child = bench.store.reserve(bench.session, b"", [bench.header([5], 1, first.prefix_hash)])[0]
        (bad, checksum), good, orphan = bench.fill(first, [1]), bench.fill(other, [2]), bench.fill(child, [5])
        outcomes = await bench.store.commit(bench.session, bench.store.epoch, [(bad, checksum ^ 1), good, orphan])
        assert outcomes == [
            pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH,
            pb.COMMIT_OUTCOME_COMMITTED,
            pb.COMMIT_OUTCOME_PARENT_MISSING,
        ]
        assert await bench.found([2]) == 1


# ---- durability ---------------------------------------------------------------------------------------------


async def test_what_is_superseded_stays_durable_until_its_successor_is() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        old, _ = await bench.put([1, 2])
        await bench.store.settle()
        bench.tier.hold()
        await bench.put([1, 2, 3, 4])
        assert [item.header.prefix_hash for item in inner.load()] == [old], "a crash here must not lose the prefix"
        bench.tier.let_go()
        await bench.store.settle()
        assert [item.header.token_count for item in inner.load()] == [4]
        assert bench.store.stats().chunks == 1


async def test_when_the_successor_cannot_be_written_the_old_chunk_stays() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        await bench.put([1, 2])
        await bench.store.settle()
        bench.tier.fail_applies(2)
        key, _ = await bench.put([1, 2, 3, 4])
        await bench.store.settle()
        await bench.store.delete(bench.root(), key)
        assert await bench.found([1, 2]) == 2
        assert len(list(inner.load())) == 1


async def test_a_write_that_failed_is_tried_again_parents_first() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        bench.tier.fail_applies(5)
        parent, _ = await bench.put([1, 2])
        await bench.put([3], start=2, parent=parent)
        await bench.store.settle()
        assert bench.store.stats().failed_writes >= 1
        for _ in range(100):
            if len(list(inner.load())) == 2:
                break
            await asyncio.sleep(0.1)
        assert [i.header.token_count for i in inner.load()] == [2, 1]


async def test_a_child_is_never_durable_without_its_parent() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        bench.tier.fail_applies(1)
        parent, _ = await bench.put([1, 2])
        await bench.store.settle()
        await bench.put([3], start=2, parent=parent)
        await bench.store.settle()
        stored = {item.header.prefix_hash for item in inner.load()}
        assert not stored or parent in stored


async def test_everything_durable_is_there_after_a_restart_with_recency_and_pins() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        keep, _ = await bench.put([1, 2])
        await bench.put([5])
        await bench.store.settle()
        bench.clock.now += 50
        bench.store.pin(bench.root(), keep)
        await bench.found([5])  # the last thing before the end, of which the tiers have not heard
    async with opened(tier=inner, clock=bench.clock) as again:
        assert again.store.stats().chunks == 2
        assert {c.tokens: round(again.clock.now - c.last_used_at) for c in again.store.tiers.index} == {1: 0, 2: 50}
        assert [c.tokens for c in again.store.tiers.index if c.pins] == [2]
        assert again.store.unpin(again.root(), keep) == 1
        with pytest.raises(ChunkNotFound):
            again.store.unpin(again.root(), keep)


async def test_a_clock_that_was_set_between_two_lives_loses_nothing() -> None:
    inner, limits = MemoryTier(), {b"brief": TenantLimits(ttl_seconds=100.0)}
    async with opened(tier=inner, limits=limits) as bench:
        await bench.put([1])
        await bench.put([2], salt=b"brief")
    for days in (-400, 1):
        clock = FakeClock(bench.clock.now + days * 86_400)
        async with opened(tier=inner, limits=limits, clock=clock) as again:
            assert [c.last_used_at <= again.store.now for c in again.store.tiers.index] == [True, True]
            await again.store.sweep()
            assert await again.found([1]) == 1
            assert await again.found([2], salt=b"brief") == (days < 0), "a day is more than its time to live"


async def test_what_is_used_before_the_clock_is_set_does_not_expire_when_it_is() -> None:
    """A machine without a battery starts in 1970, until NTP answers."""
    inner, limits = MemoryTier(), {b"brief": TenantLimits(ttl_seconds=100.0)}
    async with opened(tier=inner, limits=limits) as bench:
        await bench.put([1], salt=b"brief")
    async with opened(tier=inner, limits=limits, clock=FakeClock(5.0)) as unset:
        assert await unset.found([1], salt=b"brief") == 1
        assert unset.store.now - bench.clock.now < 60
    async with opened(tier=inner, limits=limits, clock=FakeClock(bench.clock.now + 60)) as again:
        await again.store.sweep()
        assert await again.found([1], salt=b"brief") == 1


def test_a_clock_that_is_set_back_goes_on_and_one_that_is_set_forward_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = WallClock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock() < before + 60
    monkeypatch.setattr(time, "time", lambda: before + 1e6)
    assert before + 1e6 <= clock() < before + 1e6 + 60


# ---- keeping ------------------------------------------------------------------------------------------------


async def test_a_deleted_chunk_does_not_unregister_its_successor() -> None:
    async with opened(arena_bytes=3 * SLOT, budget_bytes=8 * SLOT) as bench:
        key, _ = await bench.put([1])
        held = await bench.store.match(bench.session, b"", keys.token_bytes([1]))
        await bench.store.delete(bench.root(), key)
        await bench.put([1])
        bench.store.release(bench.session, [held.lease_id])
        successor = bench.store.find(bench.root(), key)
        assert successor in bench.store.tiers.arena_quotas, "it can be evicted like any other"
        for i in range(20):
            assert (await bench.put([50 + i]))[1] == pb.COMMIT_OUTCOME_COMMITTED


async def test_a_pin_follows_a_chunk_that_is_superseded_and_ends_by_its_old_name() -> None:
    async with opened() as bench:
        old, _ = await bench.put([1, 2])
        assert bench.store.pin(bench.root(), old) == 1
        new, _ = await bench.put([1, 2, 3])
        await bench.store.settle()
        assert bench.store.find(bench.root(), new).pins == 1
        assert bench.store.unpin(bench.root(), old) == 1
        assert bench.store.find(bench.root(), new).pins == 0


async def test_pins_have_a_budget() -> None:
    limits = {b"a": TenantLimits(pin_bytes=SLOT)}
    async with opened(limits=limits, arena_bytes=64 * SLOT) as bench:
        small, _ = await bench.put([1] * 4, salt=b"a")
        large, _ = await bench.put([2] * 100, salt=b"a")
        root = bench.root(b"a")
        assert bench.store.pin(root, small) == 1
        with pytest.raises(QuotaExceeded, match="unpin something"):
            bench.store.pin(root, large)
        bench.store.unpin(root, small)


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_a_pinned_chunk_stays_beside_a_longer_one_that_is_beyond_the_budget(is_pinned: bool) -> None:
    limits = {b"a": TenantLimits(pin_bytes=SLOT)}
    async with opened(limits=limits, arena_bytes=64 * SLOT) as bench:
        short, _ = await bench.put([1] * 4, salt=b"a")
        if is_pinned:
            bench.store.pin(bench.root(b"a"), short)
        await bench.put([1] * 100, salt=b"a")
        await bench.store.settle()
        account = bench.store.accounts.account_of(keys.tenant_id(b"a"))
        assert account.pinned_bytes <= SLOT
        assert {(c.tokens, c.pins) for c in bench.store.tiers.index} == {(100, 0)} | ({(4, 1)} if is_pinned else set())
        assert await bench.found([1] * 100, salt=b"a") == 100


async def test_what_is_not_used_within_its_time_to_live_is_gone_and_a_hit_refreshes_it() -> None:
    limits = {b"a": TenantLimits(ttl_seconds=100)}
    async with opened(limits=limits) as bench:
        await bench.put([1, 2], salt=b"a")
        await bench.put([1, 2])
        for _ in range(3):
            bench.clock.now += 90
            assert await bench.found([1, 2], salt=b"a") == 2
            await asyncio.sleep(0)
        bench.clock.now += 101
        assert await bench.found([1, 2], salt=b"a") == 0
        assert await bench.found([1, 2]) == 2, "others have no time to live"
        await bench.put([7], salt=b"a")
        bench.clock.now += 101
        await bench.store.sweep()
        assert bench.store.stats().expired_chunks == 2


# ---- tenants ------------------------------------------------------------------------------------------------


async def test_a_flood_does_not_evict_a_tenant_below_its_quota() -> None:
    limits = {b"a": TenantLimits(arena_bytes=3 * SLOT, store_bytes=40 * SLOT)}
    async with opened(arena_bytes=10 * SLOT, budget_bytes=100 * SLOT, limits=limits) as bench:
        for i in range(3):
            await bench.put([i], salt=b"a")
        await bench.store.settle()
        for i in range(200):
            await bench.put([1000 + i], salt=b"b")
        await bench.store.settle()
        mine = [c for c in bench.store.tiers.index if c.root == bench.root(b"a")]
        assert len(mine) == 3
        assert all(c.arena_state is Residency.PRESENT and c.disk_state is Residency.PRESENT for c in mine)


async def test_a_tenant_over_its_quota_evicts_its_own() -> None:
    limits = {b"a": TenantLimits(arena_bytes=3 * SLOT, store_bytes=20 * SLOT)}
    async with opened(arena_bytes=20 * SLOT, budget_bytes=1000 * SLOT, limits=limits) as bench:
        for i in range(5):
            await bench.put([500 + i], salt=b"b")
        for i in range(40):
            await bench.put([i], salt=b"a")
            await bench.store.settle()
        root = bench.root(b"a")
        resident = [c for c in bench.store.tiers.index if c.root == root and c.arena_state is Residency.PRESENT]
        durable = sum(c.stored_bytes for c in bench.store.tiers.index if c.root == root)
        assert len(resident) <= 3
        assert durable <= 20 * SLOT
        assert all([await bench.found([500 + i], salt=b"b") == 1 for i in range(5)])


async def test_a_tenant_has_at_most_so_many_chunks() -> None:
    async with opened(arena_bytes=40 * SLOT, limits={b"a": TenantLimits(entries=4)}) as bench:
        for i in range(12):
            assert (await bench.put([i], salt=b"a"))[1] == pb.COMMIT_OUTCOME_COMMITTED
            await bench.store.settle()
        assert sum(c.root == bench.root(b"a") for c in bench.store.tiers.index) <= 4


async def test_low_priority_goes_first_and_pushes_nobody_above_it_out() -> None:
    from cache_daemon.auth.tenant_limits import Priority

    limits = {b"low": TenantLimits(priority=Priority.LOW), b"high": TenantLimits(priority=Priority.HIGH)}
    async with opened(arena_bytes=8 * SLOT, budget_bytes=400 * SLOT, limits=limits) as bench:
        for i in range(4):
            await bench.put([i], salt=b"high")
            await bench.put([i], salt=b"low")
        await bench.store.settle()
        for i in range(50):
            await bench.put([100 + i], salt=b"low")
            await bench.store.settle()
        resident = [c for c in bench.store.tiers.index if c.arena_state is Residency.PRESENT]
        assert sum(c.root == bench.root(b"high") for c in resident) == 4
