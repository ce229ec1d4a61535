"""Bulk transfer of a tenant between a daemon and its remote tier, by command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from kvsidecar import keys
from kvsidecar.errors import FailedPrecondition, InvalidRequest, Unavailable

from benchmarks.condition_wait import until_async
from benchmarks.node import Node
from benchmarks.remote_servers import RedisServer, why_no_valkey
from cache_daemon.remote.bulk_transfer import TransferProgress
from cache_daemon.store.prompt_hints import PromptHints
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.operators import cache
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, Gated, Slow, node, prompt
from tests.cache_daemon.stores import FakeClock

SALT = b"one"


async def pushed(a: FleetNode, salt: bytes = SALT) -> TransferProgress:
    chunks = [chunk async for chunk in a.bench.store.listing.iter_chunks(a.bench.root(salt))]
    return [now async for now in a.remote.transfer.push(chunks)][-1]


async def pulled(a: FleetNode, salt: bytes = SALT) -> TransferProgress:
    steps = a.remote.transfer.pull(a.bench.root(salt), keys.tenant_id(salt), a.bench.session.geometry)
    return [now async for now in steps][-1]


async def test_what_one_node_pushes_another_pulls_whatever_the_policy() -> None:
    engine = InMemoryBackend()
    async with node(engine, write="never") as a, node(engine, write="never") as b:
        await a.read(prompt(3), SALT)
        await a.read([*prompt(2), 7, 8], SALT)
        await a.read(prompt(3))
        found = await pushed(a)
        assert (found.chunks, found.total, found.known, found.lost) == (4, 4, 0, 0)
        assert found.payload_bytes > 0
        again = await pushed(a)
        assert (again.chunks, again.known, again.payload_bytes) == (0, 4, 0)
        came = await pulled(b)
        assert (came.chunks, came.total, came.known) == (4, 4, 0)
        assert came.payload_bytes == found.payload_bytes
        assert await b.bench.found(prompt(3), SALT) == 3 * CHUNK
        assert await b.bench.found([*prompt(2), 7, 8], SALT) == 2 * CHUNK + 2
        assert await b.bench.found(prompt(3)) == 0, "a tenant is named, or is not meant"
        assert (await pulled(b)).known == 4


async def test_what_is_pulled_is_kept_no_longer_than_it_would_have_been_there() -> None:
    clock = FakeClock()
    engine = InMemoryBackend(clock=clock)
    async with node(engine, write="never", clock=clock, ttl_seconds=600) as a:
        await a.read(prompt(2), SALT)
        await pushed(a)
    clock.now += 100
    async with node(engine, write="never", clock=clock) as b:
        b.bench.clock.now = clock.now
        await pulled(b)
        assert {chunk.expires_at - clock.now for chunk in b.bench.store.tiers.index} == {500}
        assert await b.bench.found(prompt(2), SALT) == 2 * CHUNK
        assert not any(chunk.expires_at < inf for chunk in b.bench.store.tiers.index), "a use asks anew"


async def test_more_than_the_arena_has_goes_through_it_to_the_disk_and_back() -> None:
    engine, disk = InMemoryBackend(), MemoryTier()
    ids = prompt(60)
    async with node(engine, write="never", arena_bytes=12 * 4096, tier=disk) as a:
        for at in range(0, 60, 4):
            await a.read(ids[: (at + 4) * CHUNK], SALT)
            await a.bench.store.settle()
        assert a.stats.arena_chunks < 60
        assert (await pushed(a)).chunks == 60
    async with node(engine, write="never", arena_bytes=12 * 4096, tier=MemoryTier()) as b:
        assert (await pulled(b)).chunks == 60
        await b.bench.store.settle()
        assert b.stats.durable_chunks == 60


async def test_an_engine_that_fails_says_how_far_it_came_and_goes_on_from_there() -> None:
    engine = Slow()
    async with node(engine, write="never", arena_bytes=16 * 4096) as a:
        await a.read(prompt(10), SALT)
        chunks = [chunk async for chunk in a.bench.store.listing.iter_chunks(a.bench.root(SALT))]
        steps = a.remote.transfer.push(chunks)
        before = await anext(steps)
        while not before.done:
            before = await anext(steps)
        engine.fails = True
        with pytest.raises(Unavailable, match=f"told to; {before.done} of 10 chunks were done"):
            await anext(steps)
        engine.fails = False
        await until_async(lambda: a.tier.writes.allows_calls and a.tier.reads.allows_calls)
        found = await pushed(a)
        assert (found.known, found.chunks) == (before.done, 10 - before.done)
        engine.fails = True
        with pytest.raises(Unavailable, match="0 of 0 chunks"):
            await pulled(a)


@pytest.mark.parametrize("what", ["tenant", "chunk"])
async def test_what_is_deleted_meanwhile_neither_goes_nor_comes(what: str) -> None:
    engine = Gated()
    async with node(engine, write="never") as a, node(engine, write="never") as b:
        await a.read(prompt(3), SALT)
        await pushed(a)
        root = a.bench.root(SALT)
        first = keys.prefix_hash(root, prompt(1))
        engine.arrive.clear()
        pulling = asyncio.create_task(pulled(b))
        await until_async(lambda: engine.waiting)
        await b.bench.store.delete(root, first if what == "chunk" else b"")
        engine.arrive.set()
        assert (await pulling).chunks == 0
        assert b.stats.chunks == 0
        assert (await pushed(a)).chunks == 0, "it is older than its deletion"


async def test_who_goes_away_leaves_nothing_held() -> None:
    engine = Slow()
    async with node(engine, write="never") as a:
        await a.read(prompt(4), SALT)
        engine.put_gate.clear()
        pushing = asyncio.create_task(pushed(a))
        await until_async(lambda: engine.putting > 0)

        def held() -> int:
            return sum(chunk.in_use for chunk in a.bench.store.tiers.index if chunk.root == a.bench.root(SALT))

        assert held() > 0
        pushing.cancel()
        await asyncio.wait({pushing})
        engine.put_gate.set()
        assert held() == 0
        assert (await pushed(a)).total == 4


async def test_chunks_of_another_shape_are_left_there() -> None:
    engine = InMemoryBackend()
    async with node(engine, write="never") as a, node(engine, write="never") as b:
        await a.read(prompt(2), SALT)
        await pushed(a)
        other = replace(b.bench.session.geometry, layers=b.bench.session.geometry.layers + 1)
        steps = b.remote.transfer.pull(b.bench.root(SALT), keys.tenant_id(SALT), other)
        assert [now async for now in steps][-1] == TransferProgress()


@pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
def test_by_command(start: Callable[..., Node], tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        flags = {"remote": server.url, "remote_write": "never"}
        here, there, alone = start(**flags), start(**flags), start()
        peer, other = Peer(here), Peer(there)
        begin = peer.put([1, 2], salt=b"s3cret")
        peer.put([3], 2, begin, salt=b"s3cret")

        deadline = time.monotonic() + 20
        while here.cache_stats().remote_failing or there.cache_stats().remote_failing:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        name, salt = peer.namespace.hex(), ("--salt", "s3cret")
        assert cache("push", name, *salt, of=here).startswith("pushed 2 chunks (")
        assert "to the remote tier, 2 were there" in cache("push", name, *salt, of=here)
        assert cache("pull", name, *salt, of=there).startswith("pulled 2 chunks (")
        assert other.read([1, 2, 3], salt=b"s3cret") == 3
        assert "pulled 0 chunks" in cache("pull", name, of=there)
        with pytest.raises(InvalidRequest, match="no worker of the namespace"):
            cache("pull", "ab" * 32, of=there)
        with pytest.raises(FailedPrecondition, match="this daemon has no remote tier; start it with --remote"):
            cache("push", name, of=alone)
        with pytest.raises(InvalidRequest, match="give its address with --to"):
            cache("push", name, "--to-ca", tmp_path, of=here)
        server.stop()
        with pytest.raises(Unavailable, match=r"the remote tier fails: .*; 0 of 2 chunks were done"):
            cache("push", name, *salt, of=here)


async def test_a_push_is_no_use() -> None:
    """It counted as a use of each chunk, so a session's release removed nothing, and tenants' TTLs began again."""
    async with node(InMemoryBackend(), write="never") as a:
        header = a.bench.header([1, 2])
        (reserved,) = a.bench.store.reserve(a.bench.session, SALT, [header], PromptHints(group="agent"))
        await a.bench.store.commit(a.bench.session, a.bench.store.epoch, [a.bench.fill(reserved, [1, 2])])
        before = [(chunk.hits, chunk.last_used_at) for chunk in a.bench.store.tiers.index]
        a.bench.clock.now += 5
        assert (await pushed(a)).chunks == 1
        assert [(chunk.hits, chunk.last_used_at) for chunk in a.bench.store.tiers.index] == before
        assert await a.bench.store.groups.release(a.bench.root(SALT), "agent") == 1
