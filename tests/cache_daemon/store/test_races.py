"""Minimal cases of races that the state machine found."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import from_rpc

from benchmarks.condition_wait import until_async
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.memory.arena import Slot
from cache_daemon.store.chunk import Residency
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import opened

PAGE = 4096


async def test_chunks_that_arrive_together_keep_the_quota_together() -> None:
    limits = TenantLimits(arena_bytes=2 * PAGE)
    async with opened(limits={b"": limits}) as bench:
        reserved = bench.store.reserve(bench.session, b"", [bench.header([n]) for n in range(4)])
        items = [bench.fill(r, [n]) for n, r in enumerate(reserved)]
        await bench.store.commit(bench.session, bench.store.epoch, items)
        account = bench.store.accounts.account_of(keys.tenant_id(b""))
        assert bench.store.tiers.arena_quotas.usage_of(account) <= 2 * PAGE


async def test_an_account_lives_as_long_as_a_reservation_on_it() -> None:
    async with opened(limits={b"": TenantLimits(entries=1)}) as bench:
        first, second = bench.store.reserve(bench.session, b"", [bench.header([1]), bench.header([2])])
        await bench.store.sweep()
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(first, [1])])
        await bench.put([3])
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(second, [2])])
        assert len(bench.store.tiers.index) == 1


async def test_a_deleted_successor_takes_nothing_durable_along() -> None:
    """Its write is under way and removes what it supersedes: that is stored again."""
    async with opened() as bench:
        key, _ = await bench.put([1, 2])
        await bench.store.settle()
        await asyncio.sleep(0)
        bench.tier.hold()
        longer, _ = await bench.put([1, 2, 3])
        assert await asyncio.to_thread(bench.tier.wait_until_held)
        deleting = asyncio.create_task(bench.store.delete(bench.root(), longer))
        await until_async(lambda: bench.store.tiers.index.get(longer) is None)
        bench.tier.let_go()
        assert await deleting == 1
        await bench.store.settle()
        assert bench.store._persistence is not None
        bench.store._persistence.retry()
        await bench.store.settle()
        await asyncio.sleep(0.01)
        chunk = bench.store.find(bench.root(), key)
        assert chunk.disk_state is Residency.PRESENT
        assert {found.header.prefix_hash for found in bench.tier.inner.load()} == {key}


async def test_a_chunk_that_was_never_read_keeps_its_age() -> None:
    async with opened() as bench:
        key, _ = await bench.put([1])
        await bench.store.settle()
        await asyncio.sleep(0.01)
        assert bench.store._persistence is not None
        bench.store._persistence.write_recency()
        await bench.store.verdicts.put(
            bench.session.namespace, pb.ReuseVerdict(strategy="none")
        )  # what is queued is written
        ticks = {found.header.prefix_hash: found.last_use for found in bench.tier.inner.load()}
        assert ticks[key] == int(bench.clock.now * 1000)


async def test_a_chunk_becomes_durable_with_its_time_of_use() -> None:
    """A sudden end right afterwards, or an end that a slow disk outlasts, does not make it look new."""
    async with opened() as bench:
        await bench.put([1])
        await bench.store.settle()
        assert [found.last_use for found in bench.tier.inner.load()] == [int(bench.clock.now * 1000)]


async def test_a_use_counts_that_comes_while_the_chunk_is_being_written() -> None:
    async with opened() as bench:
        bench.tier.hold()
        await bench.put([1])
        await until_async(lambda: bench.tier.wait_until_held(0))
        bench.clock.now += 60
        assert await bench.found([1]) == 1
        assert bench.store._persistence is not None
        bench.store._lookup.apply_all_touches()
        bench.store._persistence.write_recency()
        bench.tier.let_go()
        await until_async(
            lambda: [found.last_use for found in bench.tier.inner.load()] == [int(bench.clock.now * 1000)]
        )


async def test_nothing_continues_a_chunk_that_is_about_to_be_superseded() -> None:
    async with opened() as bench:
        key, _ = await bench.put([1, 2])
        await bench.store.settle()
        await asyncio.sleep(0.01)
        reserved = bench.store.reserve(bench.session, b"", [bench.header([9], 2, key)])[0]
        bench.tier.hold()
        await bench.put([1, 2, 3])
        outcomes = await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, [9])])
        bench.tier.let_go()
        assert outcomes == [pb.COMMIT_OUTCOME_PARENT_MISSING]


async def test_deleting_a_tree_is_done_in_pieces() -> None:
    async with opened(arena_bytes=4 << 20) as bench:
        parent = b""
        for n in range(300):
            parent, _ = await bench.put([n], n, parent)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(others())
        await bench.store.delete(b"", b"")
        task.cancel()
        assert turns >= 2
        assert len(bench.store.tiers.index) == 0


def test_what_cannot_be_decoded_is_the_callers_error(peer: Peer) -> None:
    call = peer.channel.unary_unary("/kvsidecar.cache.v1.CacheService/Match")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff\xff", timeout=30)
    error = from_rpc(caught.value)
    assert error.reason == "INVALID_REQUEST"
    assert "cannot be decoded" in str(error)


async def test_what_was_written_last_has_its_time_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orderly end waits until the store has heard of what is written, and not only until it is written."""
    deliver = GroupCommitWriter._deliver

    def late(writer: GroupCommitWriter) -> None:
        time.sleep(0.1)
        deliver(writer)

    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        monkeypatch.setattr(GroupCommitWriter, "_deliver", late)
        await bench.put([1])
    bench.clock.now += 60
    async with opened(tier=inner, clock=bench.clock) as again:
        assert [round(again.clock.now - c.last_used_at) for c in again.store.tiers.index] == [60]


async def test_what_counts_at_commit_is_the_daemons_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker writes rubbish while the daemon copies, and what it had promised right afterwards."""
    async with opened() as bench:
        write = bench.store.arena.write

        def racing(slot: Slot, staged: memoryview) -> None:
            right = bytes(staged)
            staged[:] = bytes(len(staged))
            write(slot, staged)
            staged[:] = right

        monkeypatch.setattr(bench.store.arena, "write", racing)
        assert (await bench.put([1, 2, 3]))[1] == pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH
        assert await bench.found([1, 2, 3]) == 0
        monkeypatch.undo()
        assert (await bench.put([1, 2, 3]))[1] == pb.COMMIT_OUTCOME_COMMITTED
