"""Retries of failed writes, and their count."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.condition_wait import until, until_async
from cache_daemon.durable.durable_tier import WriteGroup
from cache_daemon.store.chunk import Residency
from cache_daemon.store.loss_cause import LossCause
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import opened


async def test_what_failed_is_tried_again_while_other_chunks_are_written() -> None:
    async with opened() as bench:
        persistence = bench.store._persistence
        assert persistence is not None
        await bench.store._upkeep.stop()
        bench.tier.fail_applies(2)
        failed, _ = await bench.put([1])
        await until_async(lambda: bench.store.stats().failed_writes == 1)
        assert bench.store.stats().pending_writes == 1
        await bench.put([2])
        await bench.store.settle()
        assert persistence.failing is None
        bench.tier.hold()
        await bench.put([3])
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        persistence.retry()
        assert bench.store.find(bench.root(), failed).disk_state is Residency.IN_FLIGHT
        bench.tier.let_go()
        await bench.store.settle()
        assert bench.store.stats().durable_chunks == 3
        assert bench.store.stats().pending_writes == 0


async def test_an_orderly_end_tries_once_more_what_failed() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        await bench.store._upkeep.stop()
        bench.tier.fail_applies(100)
        key, _ = await bench.put([1])
        child, _ = await bench.put([2], 1, key)
        await until_async(lambda: bench.store.stats().failed_writes > 0)
        bench.tier.heal()
    assert disk.stored_keys() == [key, child]


async def test_an_orderly_end_tries_once_more_what_fails_meanwhile() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        await bench.store._upkeep.stop()
        bench.tier.hold()
        bench.tier.fail_applies(2)
        key, _ = await bench.put([1])
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        child, _ = await bench.put([2], 1, key)
        asyncio.get_running_loop().call_later(0.2, bench.tier.let_go)
    assert disk.stored_keys() == [key, child]


async def test_what_the_budget_has_no_place_for_does_not_wait() -> None:
    async with opened(budget_bytes=0) as bench:
        key, _ = await bench.put([1])
        await bench.put([2], 1, key)
        assert bench.store.stats().pending_writes == 0


async def test_what_the_disk_has_lost_is_written_again_before_its_child() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        persistence = bench.store._persistence
        assert persistence is not None
        await bench.store._upkeep.stop()
        key, _ = await bench.put([1])
        other, _ = await bench.put([2], 1, key)
        await bench.store.settle()
        disk.apply(WriteGroup(remove=(key,)))
        child, _ = await bench.put([3], 1, key)
        for _ in range(3):
            await bench.store.settle()
            persistence.retry()
        await bench.store.settle()
        assert disk.stored_keys()[0] == key
        assert set(disk.stored_keys()) == {key, other, child}
        assert bench.store.stats().pending_writes == 0


async def test_what_disk_and_arena_have_lost_goes_with_its_children() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        await bench.store._upkeep.stop()
        key, _ = await bench.put([1])
        await bench.store.settle()
        bench.store.tiers.evict_from_arena(bench.store.find(bench.root(), key), LossCause.ARENA_FULL)
        disk.apply(WriteGroup(remove=(key,)))
        await bench.put([2], 1, key)
        await bench.store.settle()
        assert (bench.store.stats().chunks, bench.store.stats().pending_writes) == (0, 0)


@pytest.mark.parametrize("deleted", [False, True], ids=["", "and its successor is deleted"])
async def test_a_chunk_that_its_own_group_replaces_is_no_sign_of_a_loss(deleted: bool) -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        persistence = bench.store._persistence
        assert persistence is not None
        await bench.store._upkeep.stop()
        root = bench.root()
        key, _ = await bench.put([1])
        other, _ = await bench.put([2], 1, key)
        await bench.store.settle()
        bench.store.tiers.evict_from_arena(bench.store.find(root, other), LossCause.ARENA_FULL)
        bench.tier.hold()
        unrelated, _ = await bench.put([9])
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        old, _ = await bench.put([3], 1, key)
        new, _ = await bench.put([3, 4], 1, key)
        bench.tier.let_go()
        if deleted:
            until(lambda: new in disk.stored_keys())  # blocks the event loop, which does not know it yet
            bench.store.tiers.remove_subtree(bench.store.find(root, new), LossCause.DELETED)
        for _ in range(2):
            await bench.store.settle()
            persistence.retry()
        await bench.store.settle()
        kept = {key, other, unrelated, old if deleted else new}
        assert {c.key for c in bench.store.tiers.index if c.disk_state is Residency.PRESENT} == kept
        assert set(disk.stored_keys()) == kept
        stats = bench.store.stats()
        assert (stats.corrupt_chunks, stats.failed_writes, stats.pending_writes) == (0, 0, 0)


async def test_during_an_outage_a_use_retries_no_failed_chunk() -> None:
    async with opened() as bench:
        await bench.store._upkeep.stop()
        bench.tier.fail_applies(100)
        await bench.put([1])
        await until_async(lambda: bench.store.stats().failed_writes == 1)
        assert await bench.found([1]) == 1
        await bench.store.settle()
        assert bench.store.stats().failed_writes == 1
        bench.tier.heal()


async def test_a_parent_that_is_written_again_during_the_write_of_its_child_is_no_victim_before_it() -> None:
    async with opened() as bench:
        tiers, persistence = bench.store.tiers, bench.store._persistence
        assert persistence is not None
        assert tiers.disk_quotas is not None
        await bench.store._upkeep.stop()
        key, _ = await bench.put([1])
        await bench.store.settle()
        bench.tier.hold()
        child, _ = await bench.put([2], 1, key)
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        parent = bench.store.find(bench.root(), key)
        tiers.abort_write(parent)
        tiers.begin_write(parent, 4096)
        tiers.finish_write(parent, 4096)
        bench.tier.fail_applies(2)
        bench.tier.let_go()
        await until_async(lambda: bench.store.stats().failed_writes == 1)
        persistence.retry()
        await until_async(lambda: bench.store.find(bench.root(), child).disk_state is Residency.PRESENT)
        assert [chunk.key for chunk in tiers.disk_quotas.all_victims()] == [child]
