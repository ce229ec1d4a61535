"""Copies of hot chunks in GPU memory: which there are, who reads them, and when they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from cache_daemon.eviction import POLICIES
from cache_daemon.memory.arena import Slot
from cache_daemon.memory.device_memory import HostMemory
from cache_daemon.memory.gpu_arena import GpuArena
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.gpu_tier import GpuTier
from cache_daemon.store.lookup import MatchResult
from tests.cache_daemon.stores import Bench, opened

PAGE = 4096


class Gpu(GpuArena):
    """GPU memory whose copies wait or fail on command."""

    def __init__(self, pages: int) -> None:
        super().__init__(HostMemory(pages * PAGE))
        self.goes_on, self.broken, self.began = threading.Event(), False, threading.Event()
        self.goes_on.set()

    def write(self, slot: Slot, data: memoryview) -> None:
        self.began.set()
        assert self.goes_on.wait(20)
        if self.broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        super().write(slot, data)


@asynccontextmanager
async def store_with(pages: int, policy: str = "lru", arena_pages: int = 10) -> AsyncIterator[tuple[Bench, Gpu]]:
    """Run a store with a GPU arena, which the bench's session reads."""
    gpu = Gpu(pages)
    async with opened(arena_pages * PAGE, gpu_arena=gpu, new_policy=POLICIES[policy]) as bench:
        bench.session.reads_gpu = True
        try:
            yield bench, gpu
        finally:
            gpu.goes_on.set()


def tier(bench: Bench) -> GpuTier:
    assert bench.store.gpu is not None
    return bench.store.gpu


async def match(bench: Bench, ids: list[int]) -> MatchResult:
    bench.clock.now += 1
    return await bench.store.match(bench.session, b"", keys.token_bytes(ids))


async def use(bench: Bench, ids: list[int]) -> None:
    """Match and release a prompt, and wait until its chunks are copied."""
    found = await match(bench, ids)
    bench.store.release(bench.session, [found.lease_id])
    await tier(bench).settle()


async def match_during_copy(bench: Bench, gpu: Gpu, ids: list[int]) -> MatchResult:
    """Match a prompt, and return while the copy of its chunk waits for ``goes_on``."""
    gpu.goes_on.clear()
    found = await match(bench, ids)
    assert await asyncio.to_thread(gpu.began.wait, 20)
    return found


def copied(bench: Bench) -> set[bytes]:
    return {chunk.key for chunk in bench.store.tiers.index if chunk.readable_gpu_slot is not None}


def told(chunk: Chunk) -> pb.ChunkMatch:
    return pb.MatchResponse.FromString(chunk.encoded_match()).matches[0]


async def test_a_use_copies_a_chunk_and_the_next_match_tells_where() -> None:
    async with store_with(4) as (bench, gpu):
        key, _ = await bench.put([1, 2])
        chunk = bench.store.find(bench.root(), key)
        assert not told(chunk).HasField("gpu_offset")
        await use(bench, [1, 2])
        assert chunk.slot is not None
        assert chunk.readable_gpu_slot is not None
        assert told(chunk).gpu_offset == chunk.readable_gpu_slot.offset
        assert not chunk.to_match(2, with_offsets=False).HasField("gpu_offset")
        assert gpu.read(chunk.readable_gpu_slot) == bench.store.arena.read(chunk.slot)
        assert bench.store.stats().gpu_tokens == 0
        await use(bench, [1, 2])
        stats = bench.store.stats()
        assert (stats.gpu_arena_bytes, stats.gpu_arena_used_bytes) == (4 * PAGE, PAGE)
        assert (stats.gpu_chunks, stats.gpu_copies, stats.gpu_evictions, stats.gpu_tokens) == (1, 1, 0, 2)


async def test_workers_elsewhere_cause_no_copies() -> None:
    async with store_with(4) as (bench, _):
        bench.session.reads_gpu = False
        await bench.put([1])
        await use(bench, [1])
        assert not copied(bench)


async def test_a_chunk_that_is_used_replaces_the_least_recently_used_copy() -> None:
    async with store_with(2) as (bench, _):
        for n in (1, 2, 3):
            await bench.put([n])
        for n in (1, 2, 1, 3):
            bench.store._lookup.apply_all_touches()
            await use(bench, [n])
        assert copied(bench) == {bench.store.probe(bench.root(), keys.token_bytes([n]))[0].chunk.key for n in (1, 3)}
        assert bench.store.stats().gpu_evictions == 1


async def test_the_policy_keeps_a_more_valuable_copy() -> None:
    async with store_with(1, "gittins") as (bench, _):
        hot, _ = await bench.put([1])
        await bench.put([2])
        for _ in range(20):
            await use(bench, [1])
            bench.store._lookup.apply_all_touches()
        await use(bench, [2])
        assert copied(bench) == {hot}


async def test_a_copy_that_is_leased_stays() -> None:
    async with store_with(1) as (bench, _):
        first, _ = await bench.put([1])
        second, _ = await bench.put([2])
        await use(bench, [1])
        held = await match(bench, [1])
        await use(bench, [2])
        assert copied(bench) == {first}
        bench.store.release(bench.session, [held.lease_id])
        await use(bench, [2])
        assert copied(bench) == {second}


async def test_a_prompt_larger_than_the_memory_keeps_its_beginning_there() -> None:
    async with store_with(3) as (bench, _):
        path, parent = list[bytes](), b""
        for n in range(6):
            parent, _ = await bench.put([n], n, parent)
            path.append(parent)
        for _ in range(5):
            await use(bench, list(range(6)))
            bench.store._lookup.apply_all_touches()
        assert copied(bench) == set(path[:3])
        assert bench.store.stats().gpu_copies == 3


async def test_a_copy_ends_when_its_chunk_leaves_the_arena() -> None:
    async with store_with(4, arena_pages=2) as (bench, gpu):
        await bench.put([1])
        await use(bench, [1])
        assert gpu.used_bytes == PAGE
        await bench.store.settle()
        for n in range(2, 6):
            await bench.put([n])
            await bench.store.settle()
        assert not copied(bench)
        assert gpu.used_bytes == 0
        assert await bench.found([1]) == 1, "the chunk itself is on disk"


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_deleted_chunk_keeps_its_copy_until_nobody_reads_it(is_held: bool) -> None:
    async with store_with(4) as (bench, gpu):
        key, _ = await bench.put([1])
        await use(bench, [1])
        held = await match(bench, [1]) if is_held else None
        await bench.store.settle()
        await bench.store.delete(bench.root(), key)
        assert gpu.used_bytes == (PAGE if is_held else 0)
        bench.store.check_integrity()
        if held is not None:
            bench.store.release(bench.session, [held.lease_id])
        assert gpu.used_bytes == 0


async def test_a_chunk_that_is_deleted_while_it_is_copied_leaves_nothing() -> None:
    async with store_with(4) as (bench, gpu):
        key, _ = await bench.put([1])
        found = await match_during_copy(bench, gpu, [1])
        bench.store.release(bench.session, [found.lease_id])
        await bench.store.settle()
        await bench.store.delete(bench.root(), key)
        assert bench.store.arena.used_bytes == gpu.used_bytes == PAGE, "the copy reads one slot and writes the other"
        bench.store.check_integrity()
        gpu.goes_on.set()
        await tier(bench).settle()
        assert bench.store.arena.used_bytes == gpu.used_bytes == 0


async def test_a_match_during_a_copy_tells_of_none() -> None:
    async with store_with(4) as (bench, gpu):
        key, _ = await bench.put([1])
        found = await match_during_copy(bench, gpu, [1])
        assert not told(bench.store.find(bench.root(), key)).HasField("gpu_offset")
        bench.store.release(bench.session, [found.lease_id])


async def test_a_gpu_that_fails_costs_copies_only(capfd: pytest.CaptureFixture[str]) -> None:
    async with store_with(4) as (bench, gpu):
        await bench.put([1])
        second, _ = await bench.put([2])
        await use(bench, [1])
        gpu.broken = True
        await use(bench, [2])
        assert tier(bench).failed
        assert not copied(bench)
        assert not told(bench.store.find(bench.root(), second)).HasField("gpu_offset")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in capfd.readouterr().out
        gpu.broken = False
        for n in (1, 2):
            assert await bench.found([n]) == 1
        await tier(bench).settle()
        assert bench.store.stats().gpu_copies == 1, "a GPU that failed is not used again"


async def test_a_store_closes_while_copies_wait() -> None:
    async with store_with(4) as (bench, gpu):
        await bench.put([1])
        found = await match_during_copy(bench, gpu, [1])
        bench.store.release(bench.session, [found.lease_id])
        threading.Timer(0.2, gpu.goes_on.set).start()
        assert await bench.store.close()


async def test_a_chunk_larger_than_the_memory_is_read_from_the_arena() -> None:
    async with store_with(1) as (bench, _):
        small, _ = await bench.put([1])
        await bench.put([2, *range(100, 163)])
        await use(bench, [1])
        await use(bench, [2, *range(100, 163)])
        assert copied(bench) == {small}
