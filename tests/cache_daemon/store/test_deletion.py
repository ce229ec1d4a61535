"""Deleted chunks do not come back: neither from the disk, nor by a Commit of an earlier reservation."""

from __future__ import annotations

import asyncio

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.condition_wait import until_async
from cache_daemon.durable.durable_tier import PutResult, TierFailed, WriteGroup
from cache_daemon.store.chunk import Residency
from cache_daemon.store.reservations import ReserveResult
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened

GRANTED, IN_PROGRESS = pb.RESERVE_OUTCOME_GRANTED, pb.RESERVE_OUTCOME_IN_PROGRESS


def reserved(bench: Bench, ids: list[int], start: int = 0, parent: bytes = b"", salt: bytes = b"") -> ReserveResult:
    return bench.store.reserve(bench.session, salt, [bench.header(ids, start, parent)])[0]


async def outcome_of(bench: Bench, one: ReserveResult, ids: list[int]) -> str:
    outcomes = await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(one, ids)])
    return pb.CommitOutcome.Name(outcomes[0]).removeprefix("COMMIT_OUTCOME_")


# ---- on disk ------------------------------------------------------------------------------------------------


async def test_a_superseded_chunk_that_is_written_again_meanwhile_leaves_the_disk() -> None:
    """It was evicted from the disk and used again, while its successor was being written."""
    disk, short, longer = MemoryTier(), list(range(16)), list(range(24))
    async with opened(tier=disk) as bench:
        key, _ = await bench.put(short)
        await bench.store.settle()
        old = bench.store.find(bench.root(), key)
        bench.tier.hold()
        await bench.put(longer)
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        bench.store.tiers.evict_from_disk(old)
        assert await bench.found([*short, 5]) == 16
        assert old.disk_state is Residency.IN_FLIGHT
        bench.tier.let_go()
        await bench.store.settle()
        await bench.store.delete(b"", b"")
        assert disk.stored_keys() == []
    async with opened(tier=disk) as bench:
        assert await bench.found(short) == 0


class Unsure(MemoryTier):
    """A tier whose next transaction reaches the disk but still fails."""

    fails = False

    def apply(self, group: WriteGroup) -> list[PutResult]:
        results = super().apply(group)
        if self.fails:
            raise TierFailed("what was written cannot be read")
        return results


async def test_a_chunk_whose_failed_write_reached_the_disk_is_deleted_there() -> None:
    disk = Unsure()
    disk.fails = True
    async with opened(tier=disk) as bench:
        key, _ = await bench.put([1, 2])
        await until_async(lambda: bench.store.stats().failed_writes > 0)
        disk.fails = False
        assert disk.stored_keys() == [key]
        assert await bench.store.delete(bench.root(), key) == 1
        assert disk.stored_keys() == []


# ---- what is under way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["tenant", "everybody"])
async def test_what_was_reserved_before_its_tenant_was_deleted_is_not_committed(whose: str) -> None:
    async with opened() as bench:
        await bench.put([1], salt=b"t")
        before = reserved(bench, [7], salt=b"t")
        other = reserved(bench, [8], salt=b"u")
        await bench.store.delete(bench.root(b"t") if whose == "tenant" else b"", b"")
        assert await outcome_of(bench, before, [7]) == "PARENT_MISSING"
        expected = "COMMITTED" if whose == "tenant" else "PARENT_MISSING"
        assert await outcome_of(bench, other, [8]) == expected
        assert await bench.found([7], b"t") == 0
        assert bench.store.stats().reservations == 0


async def test_what_was_reserved_before_a_prefix_was_deleted_is_not_committed_behind_a_new_one() -> None:
    async with opened() as bench:
        key, _ = await bench.put([1])
        inner = reserved(bench, [2], 1, key)
        inner_key = keys.prefix_hash(key, [2])
        deeper = reserved(bench, [3], 2, inner_key)
        beside = reserved(bench, [9])
        assert await bench.store.delete(bench.root(), key) == 1
        await bench.put([1])
        again = reserved(bench, [2], 1, key)
        assert again.outcome == GRANTED, "nobody waits for what is void"
        assert await outcome_of(bench, inner, [2]) == "PARENT_MISSING"
        assert reserved(bench, [2], 1, key).outcome == IN_PROGRESS, "the new one's name is still taken"
        assert await outcome_of(bench, again, [2]) == "COMMITTED"
        assert await outcome_of(bench, deeper, [3]) == "PARENT_MISSING"
        assert await outcome_of(bench, beside, [9]) == "COMMITTED"
        assert await bench.found([1, 2, 3]) == 2


async def test_a_commit_that_copies_while_its_tenant_is_deleted_lists_nothing() -> None:
    async with opened() as bench:
        ids = [1, 2, 3]
        one = reserved(bench, ids)
        items = [bench.fill(one, ids)]
        committing = asyncio.create_task(bench.store.commit(bench.session, bench.store.epoch, items))
        await asyncio.sleep(0)
        assert not bench.session.reservations, "the commit has begun"
        await bench.store.delete(bench.root(), b"")
        assert await committing == [pb.COMMIT_OUTCOME_PARENT_MISSING]
        assert await bench.found(ids) == 0


async def test_a_deleted_chunk_that_is_only_reserved_is_not_committed() -> None:
    async with opened() as bench:
        one = reserved(bench, [1])
        with pytest.raises(Exception, match="no chunk"):
            await bench.store.delete(bench.root(), keys.prefix_hash(bench.root(), [1]))
        assert await outcome_of(bench, one, [1]) == "PARENT_MISSING"


# ---- known damage -------------------------------------------------------------------------------------------


async def test_a_chunk_that_the_writer_finds_damaged_is_dropped_with_what_continues_it() -> None:
    async with opened() as bench:
        bench.tier.hold()
        first, _ = await bench.put([1, 2])
        await bench.put([3], 2, first)
        chunk = bench.store.find(bench.root(), first)
        assert chunk.slot is not None
        bench.store.arena.read(chunk.slot)[5] ^= 0x10
        bench.tier.let_go()
        await bench.store.settle()
        assert await bench.found([1, 2, 3]) == 0
        stats = bench.store.stats()
        assert (stats.chunks, stats.corrupt_chunks, stats.failed_writes) == (0, 1, 0)
        assert stats.arena_used_bytes == 0
