"""Sharing of prompts between nodes, over the in-memory backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvsidecar import keys

from benchmarks.condition_wait import until_async
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.remote.remote_chunk_inserter import RemoteChunkInserter
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, Gated, Slow, name_of, node, parent_of, prompt
from tests.cache_daemon.stores import opened


async def test_what_one_node_has_used_twice_another_finds() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(5)
        await a.share(ids)
        found, brought = await b.ask(ids)
        assert (found, brought.tokens) == (len(ids), len(ids))
        assert (b.stats.remote_hits, b.stats.remote_tokens, b.stats.remote_rejected) == (1, len(ids), 0)
        await b.bench.store.settle()
        assert b.stats.durable_chunks == 5, "it is durable here, as what was computed here"


async def test_a_chunk_stored_after_a_fetched_prefix_survives_the_end_of_the_daemon() -> None:
    """Fetched chunks are written a second later; their new child was given up, because its parent was not on disk."""
    engine, disk, ids = InMemoryBackend(), MemoryTier(), prompt(4)
    async with node(engine) as a, node(engine, tier=disk) as b:
        await a.share(ids[: 3 * CHUNK])
        assert (await b.ask(ids))[0] == 3 * CHUNK
        await b.read(ids)
    async with opened(tier=disk) as bench:
        assert await bench.found(ids) == len(ids)


async def test_one_round_trip_finds_the_longest_prefix() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(6)
        await a.share(ids[: 4 * CHUNK])
        calls = engine.calls
        found, _ = await b.ask(ids)
        assert found == 4 * CHUNK
        assert engine.calls == calls + 2, "one to find them, one to bring them"


async def test_what_is_here_is_not_asked_for() -> None:
    engine = Slow()
    async with node(engine) as a:
        ids = prompt(3)
        await a.share(ids)
        calls = engine.calls
        await a.ask(ids)
        assert engine.calls == calls


@pytest.mark.parametrize(
    ("write", "uses", "written"), [("second-use", 1, 0), ("second-use", 2, 3), ("all", 1, 3), ("never", 3, 0)]
)
async def test_the_policy_says_what_is_written(write: str, uses: int, written: int) -> None:
    async with node(InMemoryBackend(), write=write) as a:  # type: ignore[arg-type]
        await a.read(prompt(3))
        for _ in range(uses - 1):
            await a.bench.found(prompt(3))
        await a.sent()
        assert a.stats.remote_written_chunks == written


async def test_what_another_node_has_written_is_not_written_again() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3))
        await b.share(prompt(3))
        assert (a.stats.remote_written_chunks, b.stats.remote_written_chunks) == (3, 0)


async def test_tenants_never_meet() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(3), salt=b"one")
        assert (await b.ask(prompt(3), salt=b"two"))[0] == 0
        assert (await b.ask(prompt(3)))[0] == 0
        assert (await b.ask(prompt(3), salt=b"one"))[0] == 3 * CHUNK


async def test_two_that_ask_for_the_same_bring_it_once() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        engine.seconds = 0.05
        found = await asyncio.gather(*(b.ask(prompt(4)) for _ in range(4)))
        assert [tokens for tokens, _ in found] == [4 * CHUNK] * 4
        assert b.stats.remote_lookups == 1


# ---- what it costs ------------------------------------------------------------------------------------------


async def test_who_waits_for_another_that_goes_away_brings_it_itself() -> None:
    engine = Gated()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(6))
        engine.arrive.clear()
        first, *others = (asyncio.create_task(b.ask(prompt(6))) for _ in range(3))
        await until_async(lambda: engine.waiting)
        first.cancel()
        await asyncio.wait({first})
        engine.arrive.set()
        assert [found for found, _ in await asyncio.gather(*others)] == [6 * CHUNK] * 2
        assert b.stats.remote_lookups == 2, "one of them, after the one that went"


async def test_what_is_quicker_computed_is_not_asked_for() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        calls = engine.calls
        found, brought = await b.ask(prompt(4), price=1e-9)
        assert (found, brought.tokens, engine.calls) == (0, 0, calls)
        assert b.stats.remote_bypassed == 1


async def test_what_would_come_too_slowly_is_left() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        b.tier.latency.bytes_per_second, b.tier.latency.bandwidth_measured_at = 10.0, float("inf")
        found, brought = await b.ask(prompt(4), price=0.01)
        assert (found, brought.load_slower) == (0, True)
        assert (b.stats.remote_bypassed, b.stats.remote_read_bytes) == (1, 0)
        b.tier.latency.bytes_per_second = 1e9
        assert (await b.ask(prompt(4), price=0.01))[0] == 4 * CHUNK


async def test_what_is_computed_before_it_comes_is_left() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        # Two seconds: the caller would wait for them, and computes the prompt in one.
        b.tier.latency.bytes_per_second = a.stats.remote_written_bytes / 2
        b.tier.latency.bandwidth_measured_at = float("inf")
        assert (await b.ask(prompt(4), price=1 / (4 * CHUNK), patience=60.0))[0] == 0
        assert (b.stats.remote_bypassed, b.stats.remote_read_bytes) == (1, 0)


async def test_a_link_that_was_too_slow_is_measured_while_nobody_waits() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        b.tier.latency.bytes_per_second = 10.0
        assert (await b.ask(prompt(4), price=0.01))[0] == 0
        await until_async(lambda: b.tier.counters.read_bytes > 0)
        b.tier.latency.bytes_per_second = 1e9
        assert (await b.ask(prompt(4), price=0.01))[0] == 4 * CHUNK


async def test_nobody_waits_longer_than_computing_takes() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(4))
        engine.seconds = 30.0
        found, brought = await b.ask(prompt(4), price=0.2 / (4 * CHUNK))
        assert found == 0
        assert brought.seconds < 2.0
        b.bench.store.check_integrity()


async def test_what_has_come_in_time_is_used() -> None:
    engine = Slow(part_bytes=1 << 20)
    async with node(engine) as a, node(engine) as b:
        ids = prompt(8)
        await a.share(ids)
        b.tier.group_by_call = lambda entries: [[e] for e in entries]  # type: ignore[method-assign]
        engine.hangs_at = 5  # the look-up, and the first four payloads at the most
        found, brought = await b.ask(ids, price=2.0 / len(ids))
        assert 0 < found < len(ids)
        assert brought.load_slower
        assert found % CHUNK == 0
        assert b.stats.remote_late == 1
        b.bench.store.check_integrity()


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_who_goes_away_leaves_nothing_behind(at: int) -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(6))
        engine.hangs_at = at
        b.tier.group_by_call = lambda entries: [[e] for e in entries]  # type: ignore[method-assign]
        asking = asyncio.create_task(b.ask(prompt(6)))
        await until_async(lambda: engine.hanging > 0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not b.bench.store.tiers.pending_slots
        b.bench.store.check_integrity()
        engine.hangs_at = 0
        assert (await b.ask(prompt(6)))[0] == 6 * CHUNK


async def test_what_has_come_and_is_not_placed_is_bounded_for_all_prompts_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cache_daemon.remote.remote_tier._CALL_BYTES", 1)  # a chunk a call, as with chunks of megabytes
    engine, placed, ahead = Gated(), 0, 0
    place = RemoteChunkInserter.insert

    async def slowly(self: RemoteChunkInserter, *rest: Any, **options: Any) -> bool:
        nonlocal placed, ahead
        await asyncio.sleep(0.002)
        ahead = max(ahead, engine.downloaded - placed)
        placed += 1
        return await place(self, *rest, **options)

    monkeypatch.setattr(RemoteChunkInserter, "insert", slowly)
    async with node(engine, write="all") as a, node(engine) as b:
        prompts = [prompt(20, first) for first in range(3)]
        for ids in prompts:
            await a.read(ids)
        await a.sent()
        found = await asyncio.gather(*(b.ask(ids, price=10.0) for ids in prompts))
        assert [tokens for tokens, _ in found] == [20 * CHUNK] * 3
        assert engine.downloaded == 60
        assert ahead <= 8


async def test_what_has_come_is_written_when_nobody_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.store.persistence._DELAY_SECONDS", 60.0)
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(6))
        found, _ = await b.ask(prompt(6))
        await asyncio.sleep(0.1)  # the writer has had its chance
        assert (found, b.stats.durable_chunks, b.stats.pending_writes) == (6 * CHUNK, 0, 6)
        b.bench.store.check_integrity()
        # Who waits until all is durable, as for a stop, does not wait for that.
        await asyncio.wait_for(b.bench.store.settle(), 10)
        assert (b.stats.durable_chunks, b.stats.pending_writes) == (6, 0)
        monkeypatch.setattr("cache_daemon.store.persistence._DELAY_SECONDS", 0.05)
        await a.share(prompt(4, first=1))
        await b.ask(prompt(4, first=1))
        await until_async(lambda: b.stats.durable_chunks == 10)
        b.bench.store.check_integrity()


async def test_of_a_group_with_a_damaged_payload_comes_what_is_before_it() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        await a.share(prompt(6))
        name = name_of(engine, parent_of(a, prompt(6), 4), "part")
        value, ends = engine.values[name]
        engine.values[name] = (value[:-1] + bytes([value[-1] ^ 1]), ends)
        found, _ = await b.ask(prompt(6))
        assert (found, b.stats.remote_rejected) == (3 * CHUNK, 1)
        assert b.stats.arena_used_bytes == 3 * (a.stats.arena_used_bytes // 6)
        b.bench.store.check_integrity()


async def test_a_full_arena_takes_what_fits() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine, arena_bytes=3 * 4096, budget_bytes=0) as b:
        await a.share(prompt(6))
        found, _ = await b.ask(prompt(6))
        assert 0 < found <= 3 * CHUNK
        b.bench.store.check_integrity()


async def test_a_tenant_at_its_quota_brings_no_more() -> None:
    engine = InMemoryBackend()
    limits = {b"t": TenantLimits(arena_bytes=2 * 4096)}
    async with node(engine) as a, node(engine, limits=limits) as b:
        await a.share(prompt(6), salt=b"t")
        found, _ = await b.ask(prompt(6), salt=b"t")
        assert 0 < found <= 2 * CHUNK
        b.bench.store.check_integrity()


# ---- the queue ----------------------------------------------------------------------------------------------


async def test_a_full_queue_drops_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_daemon.remote.write_behind.MAX_QUEUED_CHUNKS", 4)
    engine = Slow()
    async with node(engine) as a:
        a.tier.writes.state = a.tier.writes.state.OPEN
        engine.fails = True
        await a.read(prompt(10))
        await a.bench.found(prompt(10))
        assert a.stats.remote_pending <= 4
        assert a.stats.remote_dropped == 6


async def test_what_waited_is_sent_when_the_engine_is_back() -> None:
    engine = Slow()
    async with node(engine) as a, node(engine) as b:
        engine.fails = True
        for first in (1, 2, 3):
            await a.ask(prompt(1, first))
        assert not a.tier.reads.allows_calls
        await a.read(prompt(5))
        await a.bench.found(prompt(5))
        assert (a.stats.remote_pending, a.stats.remote_failing) == (5, "told to")
        engine.fails = False
        await until_async(lambda: a.stats.remote_written_chunks == 5)
        assert a.stats.remote_failing == ""
        assert (await b.ask(prompt(5)))[0] == 5 * CHUNK


# ---- what cannot be trusted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["head", "part"])
@pytest.mark.parametrize("how", ["garbage", "cut", "empty", "flipped", "another"])
async def test_what_fails_its_checks_is_a_miss_and_goes(what: str, how: str) -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(4)
        await a.share(ids)
        root = a.bench.root()
        second, third = (keys.prefix_hash(parent_of(a, ids, n), ids[n * CHUNK : (n + 1) * CHUNK]) for n in (1, 2))
        name, other = (name_of(engine, key, what) for key in (second, third))
        value = engine.values[name][0]
        engine.values[name] = (
            {
                "garbage": b"\xa5" * len(value),
                "cut": value[:-1],
                "empty": b"",
                "flipped": value[:40] + bytes([value[40] ^ 4]) + value[41:],
                "another": engine.values[other][0],
            }[how],
            None,
        )
        assert (await b.ask(ids))[0] <= CHUNK
        assert b.stats.remote_rejected == 1
        await b.sent()
        assert a.tier.key_schema.record_key(root, second) not in engine.values, "nobody comes across it again"
        b.bench.store.check_integrity()


async def test_a_part_that_the_engine_pushed_out_is_a_miss_and_no_reason_to_worry() -> None:
    engine = InMemoryBackend()
    async with node(engine) as a, node(engine) as b:
        ids = prompt(4)
        await a.share(ids)
        third = keys.prefix_hash(parent_of(a, ids, 2), ids[2 * CHUNK : 3 * CHUNK])
        del engine.values[name_of(engine, third, "part")]
        assert (await b.ask(ids))[0] == 2 * CHUNK
        assert b.stats.remote_rejected == 0
        await b.sent()
        assert a.tier.key_schema.record_key(a.bench.root(), third) not in engine.values, "it can be written again"


async def test_another_model_under_the_same_name_is_not_used() -> None:
    """A writer that lies about what its chunk is: every hash holds, the geometry is another."""
    from kvsidecar.chunk_layout import Geometry, new_header

    from cache_daemon.remote.remote_record import RemoteRecord, encode_record, record_epoch_of
    from tests.cache_daemon.conftest import GEOMETRY

    engine = InMemoryBackend()
    async with node(engine) as b:
        ids, root = prompt(1), b.bench.root()
        other = Geometry(GEOMETRY.layers * 2, GEOMETRY.kv_heads, GEOMETRY.head_dim, GEOMETRY.dtype, GEOMETRY.bits)
        header = new_header(other, ids, 0)
        header.root, header.parent_prefix_hash, header.tenant = root, root, keys.tenant_id(b"")
        header.prefix_hash, header.content_hash = keys.prefix_hash(root, ids), keys.content_hash(root, ids)
        payload = b"\1" * header.payload_bytes
        header.checksum = keys.checksum(payload)
        entry = RemoteRecord(header, 0, 1, len(payload), keys.checksum(payload), 0, record_epoch_of(None, b"m") or b"")
        engine.values[b.tier.key_schema.tenant_epoch_key(root)] = b"m", None
        name = b.tier.key_schema.record_key(root, header.prefix_hash)
        engine.values[name] = encode_record(b.tier.cipher, name, entry), None
        for part in b.tier.key_schema.payload_keys(root, header.prefix_hash, entry.stored_checksum, 1):
            engine.values[part] = payload, None
        assert (await b.ask(ids))[0] == 0


async def test_a_store_without_a_remote_tier_knows_nothing_of_it() -> None:
    async with opened() as bench:
        assert bench.store.remote is None
        assert bench.store.stats().remote_engine == ""
