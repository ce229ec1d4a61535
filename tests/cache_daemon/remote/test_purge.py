"""Purge of a deleted tenant: it spares the values that other nodes have written since the deletion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvsidecar import keys

from benchmarks.condition_wait import until_async
from cache_daemon.remote import tombstones
from cache_daemon.remote.key_schema import TOMBSTONE_ID_BYTES
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, node, prompt


class GatedPurge(InMemoryBackend):
    """A backend that lists a tenant's values on command, with one name per page."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.waiting = asyncio.Event(), False
        self.gate.set()

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        if not prefix.endswith("/gone/"):
            self.waiting = not self.gate.is_set()
            await self.gate.wait()
        async for page in super().scan(prefix):
            for name in page:
                yield [name]


async def test_a_purge_spares_the_same_chunks_written_after_the_deletion() -> None:
    engine = GatedPurge()
    async with node(engine) as a, node(engine) as b, node(engine) as c:
        await a.share(prompt(3))
        num_values = len(engine.values)
        engine.gate.clear()
        deletion = asyncio.create_task(a.bench.store.delete(a.bench.root(), b""))
        await until_async(lambda: engine.waiting)
        assert (await b.ask(prompt(3)))[0] == 0
        await b.share(prompt(2))
        engine.gate.set()
        await asyncio.wait_for(deletion, 10)
        assert (await c.ask(prompt(3)))[0] == 2 * CHUNK
        assert len(engine.values) == num_values - 2, "the third chunk's record and payload are gone"


async def test_a_purge_spares_the_parts_of_valid_records_only() -> None:
    engine = GatedPurge()
    async with node(engine) as a, node(engine) as b, node(engine) as c:
        await a.share(prompt(1))
        root = a.bench.root()
        (other,) = a.tier.key_schema.payload_keys(root, keys.prefix_hash(root, prompt(1)), 0x1234, 1)
        engine.values[other] = b"an earlier payload", None
        engine.gate.clear()
        deletion = asyncio.create_task(a.bench.store.delete(root, b""))
        await until_async(lambda: engine.waiting)
        await b.share(prompt(1))
        engine.gate.set()
        await asyncio.wait_for(deletion, 10)
        assert other not in engine.values
        assert (await c.ask(prompt(1)))[0] == CHUNK


async def test_a_purge_spares_tombstones_written_after_the_deletion() -> None:
    engine = GatedPurge()
    async with node(engine) as a, node(engine) as b:
        names, root = a.tier.key_schema, a.bench.root()
        await a.share(prompt(2))
        await a.bench.store.delete(root, keys.prefix_hash(root, prompt(1)))
        assert len(await tombstones.read_tombstones(a.tier, root)) == 2
        await a.share(prompt(2, 7))
        engine.gate.clear()
        deletion = asyncio.create_task(a.bench.store.delete(root, b""))
        await until_async(lambda: engine.waiting)
        later = {keys.prefix_hash(root, prompt(1, 7)) + bytes(TOMBSTONE_ID_BYTES)}
        await tombstones.write_tombstones(b.tier, root, later)
        epoch = engine.values[names.chunks_epoch_key(root)]
        engine.gate.set()
        await asyncio.wait_for(deletion, 10)
        assert await tombstones.read_tombstones(b.tier, root) == later
        assert engine.values[names.chunks_epoch_key(root)] == epoch
