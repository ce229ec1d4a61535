"""The store on a full disk: it evicts until new chunks fit, keeps half of its chunks, and recovers."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from benchmarks.condition_wait import until_async
from cache_daemon.store import persistence
from cache_daemon.store.chunk import Residency
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened

PAGE, SLOT = 4096, 4096
TOKENS_OF_PAGE = PAGE // 128


async def fill_disk(bench: Bench) -> None:
    """Store twenty chunks of one page, which fill the disk."""
    for i in range(20):
        await bench.put([i])
    await bench.store.settle()
    assert bench.store.stats().durable_chunks == 20


def large(pages: int) -> list[int]:
    """Return tokens whose payload needs that many pages in the durable tier."""
    return list(range(1000, 1000 + TOKENS_OF_PAGE * pages - 1))


async def test_a_full_disk_makes_room_and_heals() -> None:
    inner = MemoryTier()
    async with opened(tier=inner, arena_bytes=40 * SLOT, budget_bytes=1 << 20) as bench:
        for i in range(20):
            await bench.put([i])
        await bench.store.settle()
        before = bench.store.stats().durable_chunks
        bench.tier.fill_up(3)
        await bench.put([100])
        for _ in range(100):
            if not bench.store.tiers.writer or bench.store.stats().durable_evictions:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        await bench.store.settle()
        stats = bench.store.stats()
        assert stats.durable_evictions > 0
        assert stats.durable_chunks < before + 1
        assert await bench.found([100]) == 1


async def test_statistics_are_told_at_the_moment_when_a_full_disk_is_well_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as bench:
        bench.tier.fill_up(2)
        await bench.put([1])
        await bench.store.settle()
        heard = asyncio.Event()
        assert bench.store.tiers.writer is not None
        bench.store.tiers.writer.note(b"n", b"1", lambda _: heard.set())  # small things can be written
        await asyncio.wait_for(heard.wait(), 10)
        assert bench.store._persistence is not None
        told = list[str]()
        for first in (2, 3, 4):  # it counts as full for five seconds, which end between any two readings of the clock
            readings = itertools.count(bench.store._persistence._full_at + first)
            clock = SimpleNamespace(monotonic=lambda readings=readings: next(readings))
            monkeypatch.setattr(persistence, "time", clock)
            told += [bench.store.stats().durable_failing for _ in range(3)]
    assert set(told) == {"the disk is full", ""}


async def test_a_full_disk_evicts_until_a_chunk_fits() -> None:
    """One eviction of a tenth frees two pages. Nothing else is stored meanwhile."""
    async with opened(tier=MemoryTier(20 * PAGE), arena_bytes=64 * SLOT) as bench:
        await fill_disk(bench)
        key, _ = await bench.put(large(6))
        chunk = bench.store.tiers.index.get(key)
        await until_async(lambda: chunk.disk_state is Residency.PRESENT, 30)
        assert 12 <= bench.store.stats().durable_chunks <= 15


async def test_a_chunk_that_never_fits_costs_at_most_half_of_the_chunks() -> None:
    async with opened(tier=MemoryTier(20 * PAGE), arena_bytes=64 * SLOT) as bench:
        await fill_disk(bench)
        await bench.put(large(15))
        await until_async(lambda: bench.store.stats().durable_chunks <= 10, 30)
        failed = bench.store.stats().failed_writes
        await until_async(lambda: bench.store.stats().failed_writes >= failed + 2, 30)
        assert bench.store.stats().durable_chunks == 10


async def test_a_disk_that_refuses_removals_costs_a_tenth_of_the_chunks() -> None:
    """More evictions would free nothing."""
    async with opened(tier=MemoryTier(20 * PAGE), arena_bytes=64 * SLOT) as bench:
        await fill_disk(bench)
        bench.tier.fill_up(10_000)
        await bench.put(large(6))
        await until_async(lambda: bench.store.stats().failed_writes >= 4, 30)
        assert bench.store.stats().durable_chunks == 18
        bench.tier.heal()  # otherwise the store waits for the disk as it closes


@pytest.mark.parametrize("left", [True, False], ids=["with a failed chunk", "without one"])
async def test_the_budget_holds_again_after_an_outage_without_a_retry(
    monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """No retry runs while another write is in flight, or if the failed chunk has been deleted."""
    async with opened(arena_bytes=64 * SLOT) as bench:
        await fill_disk(bench)
        await bench.store._upkeep.stop()
        bench.tier.fill_up(2)
        key, _ = await bench.put([100])
        await until_async(lambda: bench.store.stats().failed_writes == 1)
        bench.tier.heal()
        if not left:
            await bench.store.delete(bench.root(), key)
        monkeypatch.setattr(persistence, "_FULL_SECONDS", 0.0)
        assert bench.store._persistence is not None
        bench.store._persistence.retry()
        for i in range(200, 210):
            await bench.put([i])
        await bench.store.settle()
        stats = bench.store.stats()
        assert (stats.durable_evictions, stats.durable_chunks) == (2, 28 + left)
