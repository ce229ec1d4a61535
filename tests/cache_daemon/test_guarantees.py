"""Guarantees of the documents, each with the test that fails without it."""

from __future__ import annotations

import asyncio

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import StoreUnavailable, UnknownSession

from benchmarks.eviction_policies import POLICIES
from cache_daemon.memory.arena import Slot
from cache_daemon.store.chunk import Residency
from tests.cache_daemon.conftest import payload_of
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import opened

PAGE = 4096


async def test_commit_verifies_the_daemons_own_copy_and_not_the_workers_memory() -> None:
    """The worker's staging holds garbage while the daemon copies, and the promised bytes as soon as it has."""
    async with opened() as bench:
        ids = [1, 2, 3]
        reserved = bench.store.reserve(bench.session, b"", [bench.header(ids)])[0]
        assert reserved.staged is not None
        assert bench.session.staging is not None
        worker = bench.session.staging.view(reserved.staged)
        right = payload_of(ids, len(worker))
        worker[:] = b"\xee" * len(worker)
        arena, copying = bench.store.arena, bench.store.arena.write

        def write(slot: Slot, data: memoryview) -> None:
            copying(slot, data)
            worker[:] = right

        arena.write = write  # type: ignore[method-assign]
        items = [(reserved.reservation_id, keys.checksum(right))]
        outcomes = await bench.store.commit(bench.session, bench.store.epoch, items)
        assert outcomes == [pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH]
        assert await bench.found(ids) == 0
        worker.release()


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_a_pinned_prefix_stays_on_disk_whatever_else_is_written(policy: str) -> None:
    disk = MemoryTier()
    async with opened(4 * PAGE, 12 * PAGE, tier=disk, new_policy=POLICIES[policy]) as bench:
        first, _ = await bench.put([1])
        key, _ = await bench.put([2], 1, first)
        await bench.store.settle()
        bench.store.pin(bench.root(), key)
        for other in range(40):
            await bench.put([100 + other])
            await bench.found([100 + other])
            await bench.store.settle()
        assert bench.store.stats().durable_evictions > 0, "the disk was full"
        assert {first, key} <= set(disk.stored_keys())
        assert await bench.found([1, 2]) == 2
    async with opened(4 * PAGE, 12 * PAGE, tier=disk, new_policy=POLICIES[policy]) as bench:
        assert bench.store.stats().pinned_bytes > 0
        assert await bench.found([1, 2]) == 2


async def test_a_match_whose_session_ends_meanwhile_keeps_no_lease() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        key, _ = await bench.put([1])
    async with opened(tier=disk) as bench:
        session = bench.open()
        bench.tier.hold()
        matching = asyncio.create_task(bench.store.match(session, b"", keys.token_bytes([1])))
        assert await asyncio.to_thread(bench.tier.wait_until_held), "it is read from the disk"
        bench.store.close_session(session)
        bench.tier.let_go()
        with pytest.raises(UnknownSession):
            await matching
        chunk = bench.store.find(bench.root(), key)
        assert (chunk.leases, chunk.arena_state) == (0, Residency.PRESENT)
        assert not session.leases


async def test_a_verdict_that_the_disk_did_not_take_is_not_told_to_be_stored() -> None:
    async with opened() as bench:
        verdict = pb.ReuseVerdict(strategy="none")
        bench.tier.fail_applies(1)
        with pytest.raises(StoreUnavailable, match="told to fail"):
            await bench.store.verdicts.put(bench.session.namespace, verdict)
        assert bench.store.verdicts.get(bench.session.namespace) == verdict
        await bench.store.verdicts.put(bench.session.namespace, verdict)
