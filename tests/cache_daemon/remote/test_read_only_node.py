"""Nodes that can read the backend but not write to it: it is full, a replica, or refuses their writes."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

import pytest
from kvsidecar import keys

from benchmarks.condition_wait import until_async
from cache_daemon.remote import tombstone_sync
from cache_daemon.remote.backend import Item, RemoteFailed
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, node, prompt
from tests.cache_daemon.remote.test_tombstone_sync import SOON, delete

OTHER = b"another tenant"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstone_sync, "_POLL_SECONDS", 0.05)


class ReadOnly(InMemoryBackend):
    """A connection to another backend's values that refuses writes on command."""

    def __init__(self, server: InMemoryBackend) -> None:
        super().__init__()
        self.values, self.refuses, self.num_refused = server.values, False, 0

    def _check(self) -> None:
        if self.refuses:
            self.num_refused += 1
            raise RemoteFailed("the server is full")

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        self._check()
        await super().put_many(items, ttl_seconds)

    async def put_if_absent(self, name: str, value: bytes) -> None:
        self._check()
        await super().put_if_absent(name, value)

    async def delete_many(self, names: Sequence[str]) -> None:
        self._check()
        await super().delete_many(names)


async def refuse_writes(b: FleetNode, engine: ReadOnly) -> None:
    """Let the backend refuse a node's writes until the node's circuit for writes is open."""
    engine.refuses = True
    for _ in range(3):
        with pytest.raises(RemoteFailed, match="the server is full"):
            await b.tier.write([("t/x", b"")], None)
    assert (b.tier.reads.allows_calls, b.tier.writes.allows_calls) == (True, False)


@pytest.mark.parametrize("what", ["tenant", "chunk", "everything"])
async def test_deletions_reach_a_node_that_cannot_write(what: str) -> None:
    """Also those of other tenants, behind the deletion of a chunk."""
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    async with node(engine) as a, node(of_b, write="never") as b:
        for salt in (b"", OTHER):
            await a.share(prompt(3), salt)
            assert (await b.ask(prompt(3), salt))[0] == 3 * CHUNK
        await refuse_writes(b, of_b)
        await delete(a, what, prompt(3))
        await until_async(lambda: b.stats.chunks == (0 if what == "everything" else 3), SOON)
        await a.bench.store.delete(a.bench.root(OTHER), b"")
        await until_async(lambda: b.stats.chunks == b.stats.durable_chunks == 0, SOON)
        assert not b.remote._tombstones._unapplied


async def test_a_lost_deletion_that_cannot_be_written_back_delays_no_other_deletion() -> None:
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    async with node(of_b) as b:
        async with node(engine) as a:
            await a.share(prompt(3))
            await b.ask(prompt(3))
            before = copy.deepcopy(engine.values)
            await delete(a, "tenant", prompt(3))
            await until_async(lambda: b.stats.chunks == 0, SOON)
        await b.share(prompt(3), OTHER)
        await refuse_writes(b, of_b)
        for name in [name for name in engine.values if b.bench.root().hex() in name]:
            del engine.values[name]
        engine.values.update(before)
        await until_async(lambda: bool(b.remote._tombstones._unapplied), SOON)
        async with node(engine) as c:
            await c.bench.store.delete(c.bench.root(OTHER), b"")
            await until_async(lambda: b.stats.chunks == 0, SOON)
        assert b.stats.remote_restored_deletions == 0
        of_b.refuses = False
        await until_async(lambda: b.stats.remote_restored_deletions > 0, SOON)
        assert (await b.ask(prompt(3)))[0] == 0


async def test_a_chunk_that_is_computed_again_stays_while_tombstones_cannot_be_written_back() -> None:
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    async with node(of_b) as b, node(engine, write="never") as a:
        for first in (0, 1):
            await b.share(prompt(1, first))
        root, schema = b.bench.root(), b.tier.key_schema
        await delete(b, "chunk", prompt(1))
        lost = [name for name in engine.values if name.startswith(schema.tombstone_key(root))]
        await refuse_writes(b, of_b)
        for name in lost:
            del engine.values[name]
        await delete(a, "chunk", prompt(1, 1))
        await until_async(lambda: b.stats.chunks == 0, SOON)
        await b.read(prompt(1, 1))
        tried = of_b.num_refused
        await until_async(lambda: of_b.num_refused > tried + 3, SOON)
        assert b.stats.chunks == 1, "only the copies from before the deletion go"
        of_b.refuses = False
        await until_async(lambda: b.stats.remote_restored_deletions > 0, SOON)
        deleted = keys.prefix_hash(root, prompt(1))
        assert any(name.startswith(schema.tombstone_key(root, deleted)) for name in engine.values)
        assert b.stats.chunks == 1


async def test_a_node_that_cannot_write_pulls_a_tenant() -> None:
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    async with node(engine) as a, node(of_b, write="never") as b:
        await a.share(prompt(3))
        await refuse_writes(b, of_b)
        session = b.bench.session
        async for progress in b.remote.transfer.pull(b.bench.root(), keys.tenant_id(b""), session.geometry):
            last = progress
        assert (last.chunks, last.lost) == (3, 0)


async def test_a_node_that_only_reads_tries_no_write_until_it_has_to() -> None:
    """It may have no right to write. A deletion needs it, and shows that it is missing."""
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    of_b.refuses = True
    async with node(engine) as a, node(of_b, write="never") as b:
        await a.share(prompt(3))
        assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        await asyncio.sleep(1.2)  # two probes
        assert (b.stats.remote_failing, b.stats.remote_failures, of_b.num_refused) == ("", 0, 0)
        await b.bench.store.delete(b.bench.root(), b"")
        await until_async(lambda: b.stats.remote_failing == "the server is full")
        tried = of_b.num_refused
        await until_async(lambda: of_b.num_refused > tried + 1)
        of_b.refuses = False
        await until_async(lambda: b.stats.remote_deletions == 0 and not b.stats.remote_failing, SOON)
        assert (await a.ask(prompt(3, 5)))[0] == 0


async def test_a_node_that_only_reads_pushes_after_an_outage() -> None:
    engine = InMemoryBackend()
    of_b = ReadOnly(engine)
    async with node(of_b, write="never") as b:
        await refuse_writes(b, of_b)
        assert b.stats.remote_failing == ""
        of_b.refuses = False
        await until_async(lambda: b.tier.writes.allows_calls)
        assert not [name for name in engine.values if name.endswith("probe")]
        await b.read(prompt(3))
        async for progress in b.remote.transfer.push(list(b.bench.store.tiers.index)):
            last = progress
        assert last.chunks == 3
