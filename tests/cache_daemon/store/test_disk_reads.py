"""Reads from a durable tier that misbehaves."""

from __future__ import annotations

import asyncio

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import COMMIT_OUTCOME_COMMITTED

from cache_daemon.durable.durable_tier import Put, ReadResult, WriteGroup
from cache_daemon.store.chunk import Residency
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened

SLOT = 4096


async def cool(bench: Bench, ids: list[int]) -> None:
    """Leave a durable chunk on disk only."""
    await bench.store.settle()
    chunk = bench.store.probe(bench.root(), keys.token_bytes(ids))[0][0]
    assert chunk.disk_state is Residency.PRESENT
    bench.store.tiers._free_slot(chunk)


async def test_a_read_that_fails_leaves_nothing_loading_and_can_be_tried_again() -> None:
    async with opened() as bench:
        await bench.put([1, 2, 3])
        await cool(bench, [1, 2, 3])
        bench.tier.fault_reads(1, ReadResult.FAILED)
        assert await bench.found([1, 2, 3]) == 0
        bench.store.check_integrity()
        assert await bench.found([1, 2, 3]) == 3, "the disk's trouble is over"
        stats = bench.store.stats()
        assert (stats.corrupt_chunks, stats.failed_reads) == (0, 1)


async def test_a_chunk_that_its_successors_transaction_has_just_removed_is_not_corrupt() -> None:
    async with opened() as bench:
        await bench.put([1, 2])
        await cool(bench, [1, 2])
        bench.tier.fault_reads(1, ReadResult.MISSING)
        chunk = bench.store.probe(bench.root(), keys.token_bytes([1, 2]))[0][0]
        chunk.write_state.superseder_count += 1  # its removal is on disk, and its outcome on the way to the loop
        assert await bench.found([1, 2]) == 0
        assert bench.store.stats().corrupt_chunks == 0
        chunk.write_state.superseder_count -= 1
        bench.tier.fault_reads(1, ReadResult.MISSING)
        assert await bench.found([1, 2]) == 0
        assert bench.store.stats().corrupt_chunks == 1, "without a successor, the disk has lost it"


async def test_a_corrupt_chunk_goes_with_all_that_continues_it() -> None:
    async with opened() as bench:
        parent, _ = await bench.put([1, 2])
        await bench.put([3], start=2, parent=parent)
        await cool(bench, [1, 2])
        bench.tier.fault_reads(1, ReadResult.CORRUPT)
        assert await bench.found([1, 2, 3]) == 0
        stats = bench.store.stats()
        assert (stats.corrupt_chunks, stats.chunks, stats.arena_used_bytes) == (1, 0, 0)


async def test_whoever_is_cancelled_while_a_chunk_is_read_holds_nothing() -> None:
    async with opened() as bench:
        await bench.put([1, 2, 3])
        await cool(bench, [1, 2, 3])
        bench.tier.hold()
        asked = asyncio.create_task(bench.store.match(bench.session, b"", keys.token_bytes([1, 2, 3])))
        await asyncio.to_thread(bench.tier.wait_until_held)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        bench.tier.let_go()
        assert await bench.found([1, 2, 3]) == 3
        assert bench.store.stats().leases == 0


async def test_two_who_want_a_cold_chunk_read_it_once() -> None:
    async with opened() as bench:
        await bench.put([1, 2, 3])
        await cool(bench, [1, 2, 3])
        found = await asyncio.gather(*(bench.found([1, 2, 3]) for _ in range(5)))
        assert found == [3] * 5
        assert bench.store.stats().arena_used_bytes == SLOT


async def put_chain(bench: Bench, chunks: int) -> list[list[int]]:
    """Store chunks of two tokens, each behind the other; return the prompt of each."""
    parent = b""
    for i in range(chunks):
        parent, _ = await bench.put([2 * i, 2 * i + 1], start=2 * i, parent=parent)
    return [list(range(2 * i + 2)) for i in range(chunks)]


async def test_what_a_window_does_not_reach_is_found_and_neither_read_nor_leased() -> None:
    async with opened() as bench:
        prompts = await put_chain(bench, 6)
        for ids in prompts:
            await bench.store.settle()
            bench.store.tiers._free_slot(bench.store.probe(bench.root(), keys.token_bytes(ids))[-1][0])
        found = await bench.store.match(bench.session, b"", keys.token_bytes([*range(12), 99]), window=3)
        assert (found.passed_tokens, [m.tokens for m in found.matches]) == (8, [2, 2])
        assert (found.promoted_tokens, bench.store.stats().arena_used_bytes) == (4, 2 * SLOT)
        assert bench.store.stats().matched_tokens == 12
        # Behind the last whole chunk a part of one is counted besides.
        await bench.put([12, 13, 14], start=12, parent=found.matches[-1].chunk.key)
        found = await bench.store.match(bench.session, b"", keys.token_bytes([*range(14), 99]), window=1)
        assert (found.passed_tokens, [m.tokens for m in found.matches]) == (10, [2, 2])


async def test_a_window_before_what_is_damaged_is_read_instead() -> None:
    async with opened() as bench:
        prompts = await put_chain(bench, 5)
        for ids in prompts:
            await bench.store.settle()
            bench.store.tiers._free_slot(bench.store.probe(bench.root(), keys.token_bytes(ids))[-1][0])
        bench.tier.fault_reads(1, ReadResult.CORRUPT)  # the first that is wanted
        found = await bench.store.match(bench.session, b"", keys.token_bytes(range(10)), window=4)
        assert (found.passed_tokens, [m.tokens for m in found.matches]) == (2, [2, 2])
        assert bench.store.stats().arena_used_bytes == 2 * SLOT
        bench.store.check_integrity()


async def test_a_match_that_fails_at_the_end_leaves_no_lease() -> None:
    async with opened() as bench:
        await bench.put(list(range(16)))
        bench.store.counters.matches = None  # type: ignore[assignment] # what cannot be counted
        with pytest.raises(TypeError):
            await bench.found(list(range(16)))
        bench.store.counters.matches = 0
        assert not bench.session.leases
        assert [chunk.leases for chunk in bench.store.tiers.index] == [0]


async def test_counters_beyond_64_bits_go_on() -> None:
    async with opened() as bench:
        bench.store.counters.requested_tokens = (1 << 64) - 3
        assert await bench.found(list(range(16))) == 0
        assert bench.store.stats().requested_tokens == 13


async def test_chunks_of_another_layout_than_their_namespace_are_dropped() -> None:
    """As an archive may have brought them into an empty store: nothing there says what their root stands for."""
    tier = MemoryTier()
    async with opened(tier=tier) as bench:
        _, outcome = await bench.put(list(range(16)))
        assert outcome == COMMIT_OUTCOME_COMMITTED
        await bench.store.settle()
    stored = next(iter(tier.load())).header
    stored.layers, stored.payload_bytes = 1, stored.payload_bytes // 2
    payload = bytes(stored.payload_bytes)
    stored.checksum = keys.checksum(payload)
    stored.token_ids[:] = range(16)
    tier.apply(WriteGroup(put=(Put(stored, memoryview(payload)),)))
    async with opened(tier=tier) as bench:
        assert len(bench.store.tiers.index) == 1
        assert await bench.found(list(range(16))) == 0
        assert (len(bench.store.tiers.index), bench.store.counters.corrupt_chunks) == (0, 1)
        _, outcome = await bench.put(list(range(16)))
        assert outcome == COMMIT_OUTCOME_COMMITTED
        assert await bench.found(list(range(16))) == 16
