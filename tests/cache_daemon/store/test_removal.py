"""Removal with descendants, its events, and insertion behind parents only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import UnknownSession

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.eviction import POLICIES
from cache_daemon.store.chunk import Residency
from cache_daemon.store.prompt_hints import PromptHints
from tests.cache_daemon.stores import Bench, opened

SLOT = 4096


async def put_until(bench: Bench, ids: list[int], ttl: int) -> bytes:
    """Store a chunk with a TTL. Returns its hash."""
    until = PromptHints(bench.store.ttl.deadline_of(ttl))
    reserved = bench.store.reserve(bench.session, b"", [bench.header(ids)], until)[0]
    await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, ids)])
    return reserved.prefix_hash


async def test_what_a_request_lets_expire_is_not_found_by_content() -> None:
    async with opened() as bench:
        await put_until(bench, [1, 2, 3, 4], 60)
        prompt, stretch = keys.token_bytes([9, 1, 2, 3, 4]), [(1, 4)]

        async def placed() -> int:
            found = await bench.store.match(
                bench.session, b"", prompt, stretch, hints=PromptHints(bench.store.ttl.deadline_of(1))
            )
            bench.store.release(bench.session, [found.lease_id])
            return sum(m.tokens for _, m in found.contents)

        bench.clock.now += 59
        assert await placed() == 4
        bench.clock.now += 2
        assert await placed() == 0


async def test_what_continues_an_expired_chunk_goes_with_it() -> None:
    async with opened(limits={b"t": TenantLimits(ttl_seconds=60)}) as bench:
        parent, _ = await bench.put([1, 2], salt=b"t")
        child, _ = await bench.put([3], 2, parent, salt=b"t")
        await bench.put([4], 3, child, salt=b"t")
        bench.clock.now += 61
        assert await bench.found([1, 2], salt=b"t") == 0
        assert bench.store.stats().chunks == 0


async def test_a_pinned_chunk_stays_on_disk_when_others_must_go() -> None:
    async with opened(arena_bytes=80 * SLOT, budget_bytes=16 * SLOT, new_policy=POLICIES["lru"]) as bench:
        pinned, _ = await bench.put([1])
        await bench.store.settle()
        bench.store.pin(bench.root(), pinned)
        for n in range(40):
            bench.clock.now += 1
            await bench.put([100 + n])
            await bench.store.settle()
        assert bench.store.stats().durable_evictions > 20
        chunk = bench.store.tiers.index.get(pinned)
        assert chunk is not None
        assert chunk.disk_state is Residency.PRESENT


async def test_a_match_whose_session_ends_meanwhile_leases_nothing() -> None:
    """Nobody would ever give the lease back: its slot would be lost until the daemon starts anew."""
    async with opened() as bench:
        key, _ = await bench.put([1, 2, 3])
        await bench.store.settle()
        chunk = bench.store.tiers.index.get(key)
        assert chunk is not None
        bench.store.tiers._free_slot(chunk)
        bench.tier.hold()
        session = bench.open()
        asked = asyncio.create_task(bench.store.match(session, b"", keys.token_bytes([1, 2, 3])))
        await asyncio.to_thread(bench.tier.wait_until_held)
        bench.store.close_session(session)
        bench.tier.let_go()
        with pytest.raises(UnknownSession):
            await asked
        assert chunk.leases == 0


async def test_watchers_hear_what_goes_out_of_memory_and_comes_back() -> None:
    async with opened(arena_bytes=SLOT) as bench:
        heard: list[pb.WatchResponse] = []

        async def watch() -> None:
            async for event in bench.store.events.follow(0, 0):
                heard.append(event)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        first, _ = await bench.put([1])
        await bench.store.settle()
        await bench.put([2])
        await bench.store.settle()
        assert await bench.found([1]) == 1
        await asyncio.sleep(0)
        watching.cancel()
        kinds = [event.type for event in heard if event.chunk.prefix_hash == first]
        told = [kind for kind in kinds if kind in (pb.EVENT_TYPE_DEMOTED, pb.EVENT_TYPE_PROMOTED)]
        assert told == [pb.EVENT_TYPE_DEMOTED, pb.EVENT_TYPE_PROMOTED]


async def test_nothing_is_given_to_the_durable_tier_before_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(arena_bytes=40 * SLOT) as bench:
        parent, _ = await bench.put([1])
        await bench.store.settle()
        chunk, writer = bench.store.tiers.index.get(parent), bench.store.tiers.writer
        assert chunk is not None
        assert writer is not None
        bench.store.tiers.evict_from_disk(chunk)  # it stays in memory
        given: list[bytes] = []
        put = writer.put

        def noted(header: ChunkHeader, *rest: Any) -> None:
            given.append(header.prefix_hash)
            put(header, *rest)

        monkeypatch.setattr(writer, "put", noted)
        child, outcome = await bench.put([2], 1, parent)
        assert outcome == pb.COMMIT_OUTCOME_COMMITTED
        assert child not in given
