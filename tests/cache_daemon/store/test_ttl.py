"""TTLs of requests: the longest counts, over restarts, in every tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.node import Node
from benchmarks.peer import payload_of
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.prompt_hints import PromptHints
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, node, prompt
from tests.cache_daemon.stores import Bench, FakeClock, opened

FOREVER = 0


async def put(bench: Bench, ids: list[int], ttl: int, start: int = 0, parent: bytes = b"", salt: bytes = b"") -> bytes:
    """Store a chunk with a TTL. Returns its hash."""
    reserved = bench.store.reserve(
        bench.session, salt, [bench.header(ids, start, parent)], PromptHints(bench.store.ttl.deadline_of(ttl))
    )[0]  # fmt: skip
    if reserved.reservation_id:
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, ids)])
    return reserved.prefix_hash


async def ask(bench: Bench, ids: list[int], ttl: int = FOREVER, salt: bytes = b"") -> int:
    """Use a prompt with a TTL. Returns the tokens found."""
    found = await bench.store.match(
        bench.session, salt, keys.token_bytes(ids), hints=PromptHints(bench.store.ttl.deadline_of(ttl))
    )  # fmt: skip
    bench.store.release(bench.session, [found.lease_id])
    return sum(m.tokens for m in found.matches)


async def test_what_is_not_asked_for_again_goes_when_its_time_is_over() -> None:
    async with opened() as bench:
        begin = await put(bench, [1, 2], 60)
        await put(bench, [3], 60, 2, begin)
        await put(bench, [7], FOREVER)
        bench.clock.now += 59
        await bench.store.sweep()
        assert bench.store.stats().chunks == 3
        bench.clock.now += 2
        assert bench.store.probe(bench.root(), keys.token_bytes([1, 2, 3])) == [], "it is a miss before it is gone"
        await bench.store.sweep()
        await bench.store.settle()
        assert (bench.store.stats().chunks, bench.store.stats().durable_chunks) == (1, 1)
        assert bench.store.stats().expired_chunks == 2
        assert await ask(bench, [7]) == 1


async def test_every_use_asks_anew_and_the_longest_counts() -> None:
    async with opened() as bench:
        await put(bench, [1, 2], 60)
        bench.clock.now += 50
        assert await ask(bench, [1, 2], 60) == 2  # to 110
        bench.clock.now += 50
        assert await ask(bench, [1, 2], 1) == 2, "it was asked for until 110"
        bench.clock.now += 9
        assert await ask(bench, [1, 2], 1000) == 2
        bench.clock.now += 900
        assert await ask(bench, [1, 2], 5) == 2, "less does not shorten it"
        bench.clock.now += 90
        assert await ask(bench, [1, 2]) == 2
        bench.clock.now += 1e9
        assert await ask(bench, [1, 2], 5) == 2, "somebody wants it for as long as there is room"
        bench.clock.now += 6
        await bench.store.sweep()
        assert bench.store.stats().chunks == 1


async def test_what_is_continued_is_kept_as_long_as_what_continues_it() -> None:
    async with opened() as bench:
        begin = await put(bench, [1, 2], 10)
        await put(bench, [3, 4], 1000, 2, begin)
        await put(bench, [5, 6], 10, 2, begin)
        bench.clock.now += 11
        await bench.store.sweep()
        assert bench.store.stats().chunks == 2
        assert await ask(bench, [1, 2, 3, 4], 10) == 4


async def test_writing_what_is_there_or_on_its_way_asks_too() -> None:
    async with opened() as bench:
        await put(bench, [1], 10)
        await put(bench, [1], 100)
        reserved = bench.store.reserve(
            bench.session, b"", [bench.header([2])], PromptHints(bench.store.ttl.deadline_of(10))
        )[0]
        other = bench.store.reserve(
            bench.open(), b"", [bench.header([2])], PromptHints(bench.store.ttl.deadline_of(100))
        )[0]
        assert other.outcome == pb.RESERVE_OUTCOME_IN_PROGRESS
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, [2])])
        bench.clock.now += 90
        assert (await ask(bench, [1], 1), await ask(bench, [2], 1)) == (1, 1)


async def test_a_longer_chunk_that_takes_its_place_is_kept_as_long() -> None:
    async with opened() as bench:
        await put(bench, [1, 2], 1000)
        await put(bench, [1, 2, 3], 10)
        await bench.store.settle()
        assert bench.store.stats().chunks == 1
        bench.clock.now += 900
        assert await ask(bench, [1, 2], 1) == 2


async def test_pins_and_tenants_limits_count_as_ever() -> None:
    async with opened(limits={b"t": TenantLimits(ttl_seconds=30)}) as bench:
        await put(bench, [1], 1000, salt=b"t")
        await put(bench, [2], 1000)
        pinned = await put(bench, [3], 10)
        bench.store.pin(bench.root(), pinned)
        bench.clock.now += 31
        await bench.store.sweep()
        assert await ask(bench, [1], salt=b"t") == 0, "a tenant's time to live wins where it is shorter"
        assert (await ask(bench, [2], 1), await ask(bench, [3], 1)) == (1, 1)


async def test_a_use_of_a_chunk_alone_postpones_the_tenants_ttl_of_what_it_continues() -> None:
    async with opened(limits={b"t": TenantLimits(ttl_seconds=100)}) as bench:
        begin = await put(bench, [1, 2], FOREVER, salt=b"t")
        key = await put(bench, [3, 4], FOREVER, 2, begin, salt=b"t")
        bench.clock.now += 60
        found = await bench.store.match(bench.session, b"t", keys.token_bytes([9, 3, 4]), [(1, 2)])
        assert [start for start, _ in found.contents] == [1]
        bench.store.release(bench.session, [found.lease_id])
        for _ in range(2):
            bench.clock.now += 60
            await bench.store.sweep()
            assert bench.store.stats().chunks == 2
            async with bench.store.reader.promoted(bench.store.find(bench.root(b"t"), key)):
                """As a Fetch without a session."""


async def test_a_sweep_looks_at_no_chunk_that_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    async with opened(limits={b"t": TenantLimits(ttl_seconds=100)}) as bench:
        for n in range(4):
            await put(bench, [n], 50)
            await put(bench, [10 + n], FOREVER, salt=b"t")
        await ask(bench, [1], 200)
        is_expired = Chunk.is_expired
        monkeypatch.setattr(Chunk, "is_expired", lambda self, now: looked.append(self.ids) or is_expired(self, now))
        bench.clock.now += 49
        await bench.store.sweep()
        assert not looked
        bench.clock.now += 2
        await bench.store.sweep()
        assert {ids[0] for ids in looked} == {0, 1, 2, 3}
        assert bench.store.stats().chunks == 5, "one is kept for longer, and those of the tenant"
        bench.clock.now += 51
        await bench.store.sweep()
        assert bench.store.stats().chunks == 1
        bench.clock.now += 100
        await bench.store.sweep()
        assert bench.store.stats().chunks == 0
        assert len(looked) < 40


async def test_limits_that_are_read_again_hold_for_stored_chunks() -> None:
    limits = {keys.tenant_id(b"t"): TenantLimits()}
    async with opened() as bench:
        bench.store.accounts._limits_of = lambda account: limits.get(account, TenantLimits())
        await put(bench, [1], FOREVER, salt=b"t")
        await put(bench, [2], FOREVER)
        limits[keys.tenant_id(b"t")] = TenantLimits(ttl_seconds=10)
        bench.store.accounts.reload()
        bench.clock.now += 11
        await bench.store.sweep()
        assert bench.store.stats().chunks == 1


async def test_a_pinned_chunk_goes_when_its_pin_and_its_time_are_over() -> None:
    async with opened() as bench:
        pinned = await put(bench, [1], 10)
        bench.store.pin(bench.root(), pinned)
        bench.clock.now += 100
        await bench.store.sweep()
        bench.store.unpin(bench.root(), pinned)
        bench.clock.now += 11
        await bench.store.sweep()
        assert bench.store.stats().chunks == 0


async def test_it_holds_over_a_restart_and_notes_do_not_gather() -> None:
    disk, clock = MemoryTier(), FakeClock()
    async with opened(tier=disk, clock=clock) as bench:
        begin = await put(bench, [1, 2], 100)
        await put(bench, [3], 50, 2, begin)
        await put(bench, [9], 10)
        await put(bench, [8], FOREVER)
    assert len([name for name in disk.notes() if name.startswith(b"kept-until:")]) == 3
    clock.now += 60
    async with opened(tier=disk, clock=clock) as bench:
        assert await ask(bench, [1, 2, 3], 1) == 2
        assert await ask(bench, [9]) == 0
        assert await ask(bench, [8]) == 1
        await ask(bench, [1, 2])
    assert [name for name in disk.notes() if name.startswith(b"kept-until:")] == []
    clock.now += 1e9
    async with opened(tier=disk, clock=clock) as bench:
        assert await ask(bench, [1, 2]) == 2


async def test_a_term_that_was_lost_shortens_nothing() -> None:
    disk, clock = MemoryTier(), FakeClock()
    async with opened(tier=disk, clock=clock) as bench:
        begin = await put(bench, [1, 2], 10)
        child = await put(bench, [3], 10, 2, begin)
    del disk._notes[b"kept-until:" + child]
    disk._notes[b"kept-until:" + b"x" * 32] = b"of a chunk that is gone"
    clock.now += 100
    async with opened(tier=disk, clock=clock) as bench:
        assert await ask(bench, [1, 2, 3]) == 3
    assert not [name for name in disk.notes() if name.startswith(b"kept-until:")]


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([FOREVER, 5, 20]), st.integers(0, 8)), max_size=25)


@given(STEPS)
def test_nobody_loses_what_was_promised(steps: list[tuple[int, int, int]]) -> None:
    """Paths of a small tree are stored or asked for, with some time, while time passes."""

    async def run() -> None:
        promised: dict[bytes, float] = {}
        async with opened(40 * 4096) as bench:
            for which, ttl, passes in steps:
                path = [[0], [which % 2], [which]][: 1 + which % 3]
                parent, at, until = b"", 0, bench.store.ttl.deadline_of(ttl)
                for ids in path:
                    parent = await put(bench, ids, ttl, at, parent)
                    promised[parent] = max(until, promised.get(parent, 0.0))
                    at += len(ids)
                bench.clock.now += passes
                await bench.store.sweep()
                bench.store.ttl.check_integrity()
                there = {chunk.key for chunk in bench.store.tiers.index}
                assert there == {key for key, end in promised.items() if end >= bench.clock.now}
                promised = {key: end for key, end in promised.items() if key in there}

    asyncio.run(run())


async def test_the_engine_is_told_and_written_to_again_when_it_is_to_be_kept_for_longer() -> None:
    now = [1000.0]
    engine, clock = InMemoryBackend(clock=lambda: now[0]), lambda: now[0]
    async with node(engine, write="all", ttl_seconds=10_000, clock=clock) as a, node(engine, clock=clock) as b:
        ids = prompt(2)
        parent, start = b"", 0
        for _ in range(2):
            part = ids[start : start + CHUNK]
            parent = await put(a.bench, part, 100, start, parent)
            start += CHUNK
        await a.sent()
        ends = {e for name, (_, e) in engine.values.items() if "/head" in name}
        assert ends == {1100.0}
        written = a.stats.remote_written_chunks
        await ask(a.bench, ids, 110)
        await a.sent()
        assert a.stats.remote_written_chunks == written, "a little more is not worth writing it again"
        await ask(a.bench, ids, 1000)
        await a.sent()
        now[0] += 500
        assert (await b.ask(ids))[0] == 2 * CHUNK


def test_it_is_asked_for_by_wire_and_said_by_list(start: Callable[..., Node]) -> None:
    peer = Peer(start())
    request = pb.ReserveRequest(session_id=peer.session, headers=[peer.header([1, 2])], ttl_seconds=600)
    (reserved,) = peer.stub.Reserve(request).reservations
    peer.staged(reserved.staging)[:] = payload_of([1, 2], reserved.staging.size_bytes)
    assert peer.commit(reserved).committed == 1
    (chunk,) = peer.list_all()
    assert 500 < chunk.ttl_seconds <= 600
    peer.read([1, 2])
    (chunk,) = peer.list_all()
    assert not chunk.HasField("ttl_seconds"), "a use that names no time asks for as long as there is room"
    for call, message in (
        (peer.stub.Reserve, pb.ReserveRequest(session_id=peer.session, ttl_seconds=2_592_001)),
        (peer.stub.Match, pb.MatchRequest(session_id=peer.session, token_ids=[1], ttl_seconds=2_592_001)),
    ):
        with pytest.raises(grpc.RpcError, match="ttl_seconds is 2592001; at most 2592000 is allowed"):
            call(message)


async def test_reading_a_chunk_for_a_transfer_leaves_its_ttl_alone() -> None:
    async with opened() as bench:
        await put(bench, [1], 10)
        (chunk,) = bench.store.tiers.index
        before = chunk.expires_at
        async with bench.store.reader.promoted(chunk):
            assert chunk.expires_at == before


async def test_a_retained_prefix_expires_later_than_the_rest() -> None:
    """A system prompt for an hour, the documents for five minutes, the rest for one: as stored, and renewed by uses."""

    def kept(bench: Bench) -> PromptHints:
        until = bench.store.ttl.deadline_of
        return PromptHints(until(60), ((2, until(3600)), (4, until(300))))

    async with opened() as bench:
        parent = b""
        for start in (0, 2, 4):
            ids = [start, start + 1]
            reserved = bench.store.reserve(bench.session, b"", [bench.header(ids, start, parent)], kept(bench))[0]
            await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, ids)])
            parent = reserved.prefix_hash

        async def left(seconds: float) -> int:
            bench.clock.now += seconds
            await bench.store.sweep()
            return sum(n for _, n in bench.store.probe(bench.root(), keys.token_bytes(range(6))))

        assert [await left(s) for s in (59, 2, 238, 2)] == [6, 4, 4, 2]
        found = await bench.store.match(bench.session, b"", keys.token_bytes(range(6)), hints=kept(bench))
        bench.store.release(bench.session, [found.lease_id])
        assert [await left(s) for s in (3599, 2)] == [2, 0], "the use has renewed it"


async def test_short_turns_keep_the_whole_conversation_within_a_tenants_ttl() -> None:
    """A worker's pool serves short turns without a Match: a Commit is then the only use of the chunks before it."""
    async with opened(40 * 4096, limits={b"t": TenantLimits(ttl_seconds=60)}) as bench:
        parent, _ = await bench.put([0], salt=b"t")
        for turn in range(1, 6):
            bench.clock.now += 20
            await bench.store.sweep()
            parent, outcome = await bench.put([turn], turn, parent, salt=b"t")
            assert outcome == pb.COMMIT_OUTCOME_COMMITTED
        assert await ask(bench, list(range(6)), salt=b"t") == 6


async def test_a_tenants_ttl_that_a_commit_renewed_holds_over_a_restart() -> None:
    disk, clock = MemoryTier(), FakeClock()
    async with opened(tier=disk, clock=clock, limits={b"t": TenantLimits(ttl_seconds=60)}) as bench:
        parent, _ = await bench.put([0], salt=b"t")
        for turn in range(1, 6):
            clock.now += 20
            parent, _ = await bench.put([turn], turn, parent, salt=b"t")
            await bench.store.settle()
    clock.now += 50
    async with opened(tier=disk, clock=clock, limits={b"t": TenantLimits(ttl_seconds=60)}) as bench:
        assert await ask(bench, list(range(6)), salt=b"t") == 6
