"""Deletion and TTL: no node finds in the backend what is deleted here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvsidecar import keys
from kvsidecar.errors import ChunkNotFound, LimitExceeded

from benchmarks.condition_wait import until_async
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.fetch_request import FetchRequest
from cache_daemon.remote.remote_prefetcher import RemotePrefetcher
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, Gated, Slow, node, parent_of, prompt


async def test_what_a_tenant_deleted_is_found_by_nobody() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3), salt=b"one")
        await a.share(prompt(3), salt=b"two")
        await a.bench.store.delete(a.bench.root(b"one"), b"")
        assert (await b.ask(prompt(3), salt=b"one"))[0] == 0
        assert (await a.ask(prompt(3), salt=b"one"))[0] == 0
        assert (await b.ask(prompt(3), salt=b"two"))[0] == 3 * CHUNK
        left = [name for name in engine.values if a.bench.root(b"one").hex() in name]
        assert [name.rpartition("/")[2] for name in left] == ["mark"]


async def test_a_chunk_is_deleted_with_what_continues_it() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(5)
        await a.share(ids)
        third = keys.prefix_hash(parent_of(a, ids, 2), ids[2 * CHUNK : 3 * CHUNK])
        assert await a.bench.store.delete(a.bench.root(), third) == 3
        assert (await b.ask(ids))[0] == 2 * CHUNK
        await b.read(ids[: 3 * CHUNK])
        await b.bench.found(ids[: 3 * CHUNK])
        await b.sent()
        assert (await b.ask(ids))[0] == 3 * CHUNK, "what continued it is gone for good"


async def test_a_chunk_that_only_the_engine_has_is_deleted_there() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(3)
        await a.share(ids)
        first = keys.prefix_hash(a.bench.root(), ids[:CHUNK])
        assert await b.bench.store.delete(b.bench.root(), first) == 3
        async with node(engine) as c:
            assert (await c.ask(ids))[0] == 0


async def test_everything_is_deleted() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3), salt=b"one")
        await a.share(prompt(3))
        await a.bench.store.delete(b"", b"")
        assert (await b.ask(prompt(3)))[0] == (await b.ask(prompt(3), salt=b"one"))[0] == 0
        assert {name.rpartition("/")[2] for name in engine.values} == {"mark"}


async def test_what_another_node_had_queued_before_a_deletion_is_worth_nothing_after_it() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b, node(engine) as c:
        await a.share(prompt(2))
        await b.ask(prompt(2, 7))  # it has seen the tenant's mark
        engine.seconds = 0.2
        await b.read(prompt(2, 7))
        calls = engine.calls
        await b.bench.found(prompt(2, 7))
        await until_async(lambda: engine.calls > calls)  # it is looked up there before it is written
        engine.seconds = 0.0
        await a.bench.store.delete(a.bench.root(), b"")
        await b.sent()
        assert (await c.ask(prompt(2, 7)))[0] == 0
        await b.share(prompt(2, 8))
        assert (await c.ask(prompt(2, 8)))[0] == 2 * CHUNK, "what came after it is shared"


async def test_a_deletion_outlives_an_engine_that_is_away_and_a_restart() -> None:
    engine, disk = Slow(), MemoryTier()
    async with node(engine, tier=disk) as a:
        await a.share(prompt(3))
        engine.fails = True
        await a.bench.store.delete(a.bench.root(), b"")
        assert a.stats.remote_deletions == 1
        await a.bench.store.settle()
    engine.fails = False
    engine.put_gate.clear()
    async with node(engine, tier=disk) as a:
        assert a.stats.remote_deletions == 1
        assert (await a.ask(prompt(3)))[0] == 0, "it is still there, and must not be read"
        engine.put_gate.set()
        await until_async(lambda: a.stats.remote_deletions == 0)
        assert (await a.ask(prompt(3)))[0] == 0
        await a.bench.store.settle()
    assert not [name for name in disk.notes() if name.startswith(b"remote-forget:")]
    async with node(engine) as b:
        assert (await b.ask(prompt(3)))[0] == 0


async def test_the_same_deletion_waits_once_and_a_tenant_may_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.remote.tombstones.MAX_PER_TENANT", 8)
    engine = Slow()
    async with node(engine) as a:
        await a.share(prompt(3))
        engine.fails = True
        store, root = a.bench.store, a.bench.root()
        futures = {a.remote.delete(root, b"") for _ in range(50)}
        assert (a.stats.remote_deletions, len(futures)) == (1, 1)
        for number in range(7):
            a.remote.delete(root, bytes([number]) * 32)
        with pytest.raises(LimitExceeded, match=r"3 chunks were deleted on this node.*8 deletions of this tenant"):
            await store.delete(root, keys.prefix_hash(root, prompt(1)))
        assert a.stats.chunks == 0, "here they are deleted all the same"
        a.remote.delete(a.bench.root(b"other"), b"x" * 32)
        engine.fails = False
        await until_async(lambda: a.stats.remote_deletions == 0)
        assert all(done.done() for done in futures)


async def test_a_caller_cannot_fill_the_queue_of_deletions_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.remote.tombstones.MAX_PER_CALLER", 4)
    monkeypatch.setattr("cache_daemon.remote.tombstones.MAX_OF_CALLERS", 6)
    engine = Slow()
    async with node(engine) as a:
        engine.fails = True

        def delete(number: int, owner: str | None) -> None:
            a.remote.delete(a.bench.root(bytes([number])), b"x" * 32, owner=owner)

        for number in range(4):
            delete(number, "guest")
        with pytest.raises(LimitExceeded, match="4 deletions of this caller"):
            delete(4, "guest")
        delete(3, "guest")  # it waits already
        for number in range(10, 12):
            delete(number, "other")
        with pytest.raises(LimitExceeded, match="6 of all callers"):
            delete(12, "other")
        delete(13, None)
        engine.fails = False
        await until_async(lambda: a.stats.remote_deletions == 0)
        delete(4, "guest")
        await until_async(lambda: a.stats.remote_deletions == 0)


async def test_a_deletion_that_runs_does_not_serve_who_asks_after_it_began() -> None:
    engine = Slow()
    async with node(engine) as a:
        engine.put_gate.clear()
        first = a.remote.delete(a.bench.root(), b"")
        await until_async(lambda: engine.putting > 0)
        second = a.remote.delete(a.bench.root(), b"")
        assert second is not first
        engine.put_gate.set()
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        assert a.stats.remote_deletions == 0


async def test_a_hash_that_nobody_knows_is_looked_up_and_not_searched_for() -> None:
    engine = Slow()
    async with node(engine) as a:
        await a.share(prompt(3))
        engine.scans = 0
        with pytest.raises(ChunkNotFound):
            await a.bench.store.delete(a.bench.root(), b"x" * 32)
        assert (engine.scans, a.stats.remote_deletions) == (0, 0)


async def test_a_chunk_goes_with_the_parts_of_every_payload_that_it_had() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a:
        ids = prompt(2)
        await a.share(ids)
        root = a.bench.root()
        first = keys.prefix_hash(root, ids[:CHUNK])
        (other,) = a.tier.key_schema.payload_keys(root, first, 0x1234, 1)
        engine.values[other] = b"another writer's", None
        assert await a.bench.store.delete(root, first) == 2
        names = a.tier.key_schema
        left = [name for name in engine.values if root.hex() in name and names.parse_tombstone_key(root, name) is None]
        assert sorted(left) == sorted([names.tenant_epoch_key(root), names.chunks_epoch_key(root)])


@pytest.mark.parametrize("what", ["tenant", "everything"])
async def test_a_mark_that_the_engine_pushed_out_brings_nothing_back(what: str) -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        late = {name: value for name, value in engine.values.items() if not name.endswith("/mark")}
        await a.bench.store.delete(a.bench.root() if what == "tenant" else b"", b"")
        engine.values |= late  # what a node writes that looked before the deletion
        assert (await b.ask(prompt(3)))[0] == 0
        for name in [name for name in engine.values if name.endswith("/mark")]:
            del engine.values[name]
        assert (await b.ask(prompt(3)))[0] == 0
        await a.share(prompt(2, 7))
        assert (await b.ask(prompt(3)))[0] == 0
        await a.share(prompt(2, 8))
        assert (await b.ask(prompt(2, 8)))[0] == 2 * CHUNK, "a writer gives the tenant a mark again"


async def test_what_a_node_has_from_before_a_deletion_elsewhere_is_not_written_back() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        await a.bench.store.delete(a.bench.root(), b"")
        await b.ask(prompt(2, 9))  # any other prompt of the tenant
        await b.bench.found(prompt(3))
        await b.sent()
        assert (await a.ask(prompt(3)))[0] == 0


async def test_what_was_deleted_elsewhere_is_remembered_among_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.remote.deletion_epochs._MAX_TENANTS", 2)
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        await a.bench.store.delete(a.bench.root(), b"")
        await b.ask(prompt(2, 9))
        for other in (b"one", b"two", b"three"):
            await a.share(prompt(2), salt=other)
            assert (await b.ask(prompt(2), salt=other))[0] == 2 * CHUNK
        await b.bench.found(prompt(3))
        await b.sent()
        assert (await a.ask(prompt(3)))[0] == 0
        await b.share(prompt(2, 4))
        assert (await a.ask(prompt(2, 4)))[0] == 2 * CHUNK, "what came after it is shared"


async def test_deletions_of_a_tenant_with_chunks_here_are_noticed_among_many_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache_daemon.remote.deletion_epochs._MAX_TENANTS", 2)
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        others = [b"%d" % n for n in range(12)]
        for salt in (b"", *others[:3]):
            await a.share(prompt(3), salt)
            assert (await b.ask(prompt(3), salt))[0] == 3 * CHUNK
        for salt in others[3:]:
            await a.share(prompt(3), salt)
            assert (await b.ask(prompt(3, 9), salt))[0] == 0
        await a.bench.store.delete(a.bench.root(), b"")
        await until_async(lambda: b.stats.chunks == b.stats.durable_chunks == 9)
        assert await b.bench.found(prompt(3)) == 0
        await b.sent()
        assert (await a.ask(prompt(3)))[0] == 0
        assert len(list(b.remote._epochs)) <= 6, "the others' records are dropped"


@pytest.mark.parametrize("what", ["tenant", "everything"])
async def test_however_often_removing_fails_a_mark_is_made_anew_once(what: str) -> None:
    """Each new one is a deletion to all other nodes, and ends what they have written meanwhile."""

    class Unlisted(Slow):
        refused, marks = 3, 0

        async def put_many(self, items, ttl_seconds):  # type: ignore[no-untyped-def]
            self.marks += sum(name.endswith("/mark") and "/deletions/" not in name for name, _ in items)
            await super().put_many(items, ttl_seconds)

        async def scan(self, prefix):  # type: ignore[no-untyped-def]
            if self.refused:
                self.refused -= 1
                raise RemoteFailed("told to")
            async for page in super().scan(prefix):
                yield page

    engine = Unlisted()
    async with node(engine) as a:
        await a.share(prompt(3))
        deletion = a.remote.delete(a.bench.root() if what == "tenant" else b"", b"")
        assert engine.marks == 0, "the first one is made where there is none"
        await until_async(deletion.done)
        assert (engine.refused, engine.marks) == (0, 1)
        assert (await a.ask(prompt(3, 5)))[0] == 0
        await asyncio.wait_for(asyncio.shield(a.remote.delete(a.bench.root(), b"")), 10)
        assert engine.marks == 2, "asked for again, it is made again"


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_what_was_on_its_way_here_when_it_was_deleted_does_not_come(what: str) -> None:
    engine = Gated()
    async with node(engine) as a, node(engine) as b:
        ids, root = prompt(3), a.bench.root(b"one")
        await a.share(ids, salt=b"one")
        engine.arrive.clear()
        asking = asyncio.create_task(b.ask(ids, salt=b"one", price=10.0))
        await until_async(lambda: engine.waiting)
        first = keys.prefix_hash(root, ids[:CHUNK])
        await b.bench.store.delete(b"" if what == "everything" else root, first if what == "chunk" else b"")
        assert b.stats.remote_deletions == 0
        engine.arrive.set()
        assert (await asking)[0] == 0
        await b.bench.store.settle()
        assert (b.stats.chunks, b.stats.durable_chunks) == (0, 0)


async def test_who_asks_as_a_deletion_begins_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        missing = RemotePrefetcher._missing_chunks

        async def and_deleted(self: RemotePrefetcher, wanted: FetchRequest) -> Any:
            engine.put_gate.clear()
            b.remote.delete(b.bench.root(), b"")
            return await missing(self, wanted)

        monkeypatch.setattr(RemotePrefetcher, "_missing_chunks", and_deleted)
        assert (await b.ask(prompt(3)))[0] == 0
        engine.put_gate.set()
        await until_async(lambda: b.stats.remote_deletions == 0)
        assert b.stats.chunks == 0


async def test_values_end_with_the_tier_or_with_their_tenant() -> None:
    now = [1000.0]
    engine = InMemoryBackend(clock=lambda: 0.0)  # one that keeps everything
    limits = {b"short": TenantLimits(ttl_seconds=10)}
    async with node(engine, ttl_seconds=100, limits=limits, clock=lambda: now[0]) as a:
        await a.share(prompt(2))
        await a.share(prompt(2), salt=b"short")
        async with node(engine, ttl_seconds=100, limits=limits, clock=lambda: now[0]) as b:
            now[0] += 11
            assert (await b.ask(prompt(2), salt=b"short"))[0] == 0
            assert (await b.ask(prompt(2)))[0] == 2 * CHUNK
        now[0] += 90
        async with node(engine, clock=lambda: now[0]) as c:
            assert (await c.ask(prompt(2)))[0] == 0
