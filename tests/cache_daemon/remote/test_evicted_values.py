"""Values that the backend evicted while nodes hold the chunks: the next uses write them again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cache_daemon.remote import write_behind
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, FleetNode, node, parent_of, prompt

WEEK = 7 * 86400


@pytest.fixture
def check_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_CHECK_SECONDS", 0.0)


class Observed(InMemoryBackend):
    """A backend that counts lookups of records, and answers them on command."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lookups, self.answers = 0, asyncio.Event()
        self.answers.set()

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        if names[-1].endswith("/head"):
            self.num_lookups += 1
            await self.answers.wait()
        return await super().get_many(names, lane, max_bytes)


def evict_first_chunk(engine: InMemoryBackend, a: FleetNode) -> None:
    """Remove the record and payload of the first chunk of ``prompt(n)``, as ``volatile-lru`` does."""
    first = parent_of(a, prompt(1), 1)
    evicted = [name for name in engine.values if f"/{first.hex()}/" in name]
    assert len(evicted) == 2
    for name in evicted:
        del engine.values[name]


@pytest.mark.usefixtures("check_at_each_use")
@pytest.mark.parametrize("ttl_seconds", [WEEK, None])
async def test_a_use_writes_an_evicted_value_again(ttl_seconds: int | None) -> None:
    engine = InMemoryBackend()
    async with node(engine, ttl_seconds=ttl_seconds) as a:
        await a.share(prompt(3))
        evict_first_chunk(engine, a)
        await a.bench.found(prompt(3))
        await a.sent()
        assert (a.stats.remote_written_chunks, a.stats.remote_dropped) == (3 + 1, 0)
        async with node(engine) as b:
            assert (await b.ask(prompt(3)))[0] == 3 * CHUNK


@pytest.mark.usefixtures("check_at_each_use")
async def test_a_fetched_chunk_is_written_again_by_the_node_that_fetched_it() -> None:
    engine = InMemoryBackend()
    async with node(engine) as b:
        async with node(engine) as a:
            await a.share(prompt(3))
            assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
        await b.sent()
        evict_first_chunk(engine, b)
        await b.bench.found(prompt(3))
        await b.sent()
        assert b.stats.remote_written_chunks == 1
        async with node(engine) as c:
            assert (await c.ask(prompt(3)))[0] == 3 * CHUNK


async def test_a_chunk_whose_parent_was_evicted_is_written_at_its_next_use() -> None:
    """The first use finds the parent missing, long before the parent itself is checked."""
    engine = InMemoryBackend()
    async with node(engine, ttl_seconds=WEEK) as a:
        await a.share(prompt(1))
        evict_first_chunk(engine, a)
        await a.share(prompt(2))
        assert (a.stats.remote_written_chunks, a.stats.remote_dropped) == (1, 1)
        await a.bench.found(prompt(2))
        await a.sent()
        assert a.stats.remote_written_chunks == 1 + 2
        async with node(engine) as b:
            assert (await b.ask(prompt(2)))[0] == 2 * CHUNK


async def test_chunks_are_not_checked_at_every_use() -> None:
    engine = Observed()
    async with node(engine, ttl_seconds=WEEK) as a:
        await a.share(prompt(3))
        lookups = engine.num_lookups
        for _ in range(5):
            await a.bench.found(prompt(3))
            await a.sent()
        assert engine.num_lookups == lookups > 0


@pytest.mark.usefixtures("check_at_each_use")
async def test_a_prompt_does_not_wait_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "_LOOKUP_TIMEOUT_SECONDS", 60.0)
    engine = Observed()
    async with node(engine, ttl_seconds=WEEK) as a:
        await a.share(prompt(3))
        engine.answers.clear()
        async with asyncio.timeout(30.0):
            assert (await a.ask(prompt(3)))[0] == 3 * CHUNK
        assert a.stats.remote_pending == 3, "the writer checks them behind the answer"
        engine.answers.set()
        await a.sent()
        assert (a.stats.remote_written_chunks, a.stats.remote_dropped) == (3, 0)
