"""Retention: eviction spares chunks until a deadline, within quotas; low priority is evicted first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import QuotaExceeded

from benchmarks.node import Node
from benchmarks.peer import payload_of
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.durable.durable_tier import WriteGroup
from cache_daemon.durable.record_format import EXPIRY_NOTE_PREFIX, decode_expiry, encode_expiry
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.retained_chunks import NOTE_PREFIX, RetainedChunks
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, FakeClock, opened

SLOT = 4096
ALL = 2**32 - 1


def retain(bench: Bench, seconds: float, end: int = ALL) -> PromptHints:
    return PromptHints(retained=((end, bench.clock.now + seconds),))


async def put(
    bench: Bench, ids: list[int], hints: PromptHints = NO_HINTS, start: int = 0, parent: bytes = b"", salt: bytes = b""
) -> bytes:
    """Store a chunk, and wait for the disk. Returns its hash."""
    reserved = bench.store.reserve(bench.session, salt, [bench.header(ids, start, parent)], hints)[0]
    if reserved.reservation_id:
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, ids)])
        await bench.store.settle()
    return reserved.prefix_hash


async def use(bench: Bench, ids: list[int], hints: PromptHints = NO_HINTS, salt: bytes = b"") -> None:
    found = await bench.store.match(bench.session, salt, keys.token_bytes(ids), hints=hints)
    bench.store.release(bench.session, [found.lease_id])


async def flood(bench: Bench, salt: bytes = b"flood", chunks: int = 120) -> None:
    """Store and use so many chunks that everything else is evicted."""
    for i in range(chunks):
        await put(bench, [10_000 + i], salt=salt)
        await use(bench, [10_000 + i], salt=salt)


def known(bench: Bench, ids: list[int], salt: bytes = b"") -> int:
    return sum(n for _, n in bench.store.probe(bench.root(salt), keys.token_bytes(ids)))


async def test_a_retained_chunk_survives_a_flood_until_its_deadline() -> None:
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT) as bench:
        await put(bench, [1, 2], retain(bench, 300))
        await put(bench, [3, 4])
        await use(bench, [3, 4])
        await flood(bench)
        assert (known(bench, [1, 2]), known(bench, [3, 4])) == (2, 0)
        bench.clock.now += 301
        await bench.store.sweep()
        assert known(bench, [1, 2]) == 2, "the end of a retention removes nothing"
        await flood(bench, b"later")
        assert known(bench, [1, 2]) == 0


async def test_a_retention_removes_no_chunk_that_would_have_stayed_without_it() -> None:
    """Five minutes of retention are a minimum: hours later the chunk is there, and has no TTL."""
    async with opened() as bench:
        await put(bench, [1, 2], retain(bench, 300))
        bench.clock.now += 30 * 86400
        await bench.store.sweep()
        assert known(bench, [1, 2]) == 2
        assert bench.store.tiers.index.get(await put(bench, [1, 2])).expires_at == inf  # type: ignore[union-attr]


async def test_a_use_renews_a_retention_and_never_shortens_it() -> None:
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT) as bench:
        await put(bench, [1, 2], retain(bench, 100))
        bench.clock.now += 90
        await use(bench, [1, 2], retain(bench, 100))
        await use(bench, [1, 2], retain(bench, 1))
        await use(bench, [1, 2])
        bench.clock.now += 90
        await bench.store.sweep()
        await flood(bench)
        assert known(bench, [1, 2]) == 2


async def test_only_the_named_part_of_a_prompt_is_retained() -> None:
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT) as bench:
        hints = retain(bench, 300, end=2)
        first = await put(bench, [1, 2], hints)
        await put(bench, [3, 4], hints, 2, first)
        assert bench.store.stats().retained_bytes == bench.store.find(bench.root(), first).size_bytes
        await flood(bench)
        assert known(bench, [1, 2, 3, 4]) == 2


async def test_a_content_match_is_retained_by_its_position_in_this_prompt() -> None:
    async with opened() as bench:
        begin = await put(bench, [1, 2])
        late = await put(bench, [3, 4], start=2, parent=begin)
        ids, ranges = keys.token_bytes([3, 4, 9, 1, 2]), [(0, 2), (3, 2)]
        found = await bench.store.match(bench.session, b"", ids, ranges, hints=retain(bench, 300, end=2))
        assert [start for start, _ in found.contents] == [0, 3]
        bench.store.release(bench.session, [found.lease_id])
        chunks = [bench.store.find(bench.root(), key) for key in (begin, late)]
        assert [chunk.is_retained for chunk in chunks] == [False, True]


async def test_retention_counts_against_the_pin_quota_and_never_blocks_the_tenant() -> None:
    limits = {b"a": TenantLimits(pin_bytes=2 * SLOT), b"q": TenantLimits(arena_bytes=4 * SLOT, store_bytes=8 * SLOT)}
    async with opened(arena_bytes=32 * SLOT, budget_bytes=80 * SLOT, limits=limits) as bench:
        for salt, most in ((b"a", 2), (b"q", 2)):
            for i in range(10):
                await put(bench, [i], retain(bench, 3600), salt=salt)
                assert known(bench, [i], salt) == 1, "a full quota for retention stores new chunks all the same"
            account = bench.store.accounts.account_of(keys.tenant_id(salt))
            assert 0 < account.retained_bytes <= most * SLOT
        pinned = await put(bench, [77], salt=b"a")
        assert bench.store.pin(bench.root(b"a"), pinned) == 1, "retention does not take the quota from pins"


async def test_one_tenant_cannot_retain_the_whole_store() -> None:
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT) as bench:
        for i in range(100):
            await put(bench, [i], retain(bench, 30 * 86400), salt=b"greedy")
        assert bench.store.stats().retained_bytes <= 20 * SLOT
        await put(bench, [1, 2], salt=b"modest")
        assert known(bench, [1, 2], b"modest") == 2
        assert bench.store.pin(bench.root(b"modest"), await put(bench, [1, 2], salt=b"modest")) == 1


@pytest.mark.parametrize("limits", [None, {b"pins": TenantLimits(pin_bytes=8 * SLOT)}])
async def test_pins_and_retentions_share_one_limit(limits: dict[bytes, TenantLimits] | None) -> None:
    """Pins did not count retained bytes, so both together could protect the whole disk, and a whole quota twice."""
    retaining, most = (b"retains", 20 * SLOT) if limits is None else (b"pins", 8 * SLOT)
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT, limits=limits) as bench:
        for i in range(30):
            await put(bench, [i] * 20, retain(bench, 3600), salt=retaining)
        before, pinned, size = bench.store.stats().retained_bytes, list[bytes](), 20 * 128
        for i in range(most // size):
            pinned.append(await put(bench, [100 + i] * 20, salt=b"pins"))
            bench.store.pin(bench.root(b"pins"), pinned[-1])
            stats = bench.store.stats()
            assert stats.pinned_bytes + stats.retained_bytes <= most
        last = await put(bench, [99] * 20, salt=b"pins")
        with pytest.raises(QuotaExceeded):
            bench.store.pin(bench.root(b"pins"), last)
        await flood(bench)
        assert known(bench, [10_119], b"flood") == 1
        bench.store.check_integrity()
        for key in pinned:
            bench.store.unpin(bench.root(b"pins"), key)
        for i in range(30):
            await put(bench, [i] * 20, retain(bench, 3600), salt=retaining)
        assert bench.store.stats().retained_bytes == before, "without the pins, the retentions have their place again"


async def test_a_pin_ends_the_retention_of_the_end_of_a_prompt_first() -> None:
    limits = {b"a": TenantLimits(pin_bytes=3 * 20 * 128)}  # three chunks of 20 tokens
    disk = MemoryTier()
    async with opened(limits=limits, tier=disk) as bench:
        hints, path = retain(bench, 3600), [b""]
        for i in range(3):
            path.append(await put(bench, [i] * 20, hints, 20 * i, path[-1], b"a"))
        bench.store.pin(bench.root(b"a"), await put(bench, [9] * 20, salt=b"a"))
        retained = [bench.store.find(bench.root(b"a"), key).is_retained for key in path[1:]]
        assert retained == [True, True, False]
    assert {NOTE_PREFIX + key for key in path[1:3]} == {n for n in disk.notes() if n.startswith(NOTE_PREFIX)}


async def test_a_refused_retention_begins_when_the_quota_allows_it() -> None:
    limits = {b"a": TenantLimits(pin_bytes=SLOT)}
    async with opened(limits=limits) as bench:
        first = await put(bench, [1] * 20, retain(bench, 100), salt=b"a")
        second = await put(bench, [2] * 20, retain(bench, 1000), salt=b"a")
        size = bench.store.find(bench.root(b"a"), first).size_bytes
        assert size <= SLOT < 2 * size
        assert not bench.store.find(bench.root(b"a"), second).is_retained
        bench.clock.now += 101
        await bench.store.sweep()
        assert bench.store.find(bench.root(b"a"), second).is_retained
        await bench.store.sweep()
        assert bench.store.stats().retained_bytes == size


async def test_a_sweep_retries_a_limited_number_of_retentions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep walked all chunks with a deadline: each second, and without an answer to anyone meanwhile."""
    limits = {b"a": TenantLimits(pin_bytes=0)}
    async with opened(600 * SLOT, 1200 * SLOT, limits=limits, staging_bytes=4 << 20) as bench:
        await bench.store._upkeep.stop()
        reserved = [bench.header([i]) for i in range(500)]
        results = bench.store.reserve(bench.session, b"a", reserved, retain(bench, 3600))
        items = [bench.fill(result, [i]) for i, result in enumerate(results)]
        assert set(await bench.store.commit(bench.session, bench.store.epoch, items)) == {pb.COMMIT_OUTCOME_COMMITTED}
        await bench.store.settle()
        tried, fits = [], RetainedChunks._fits

        def count(self: RetainedChunks, chunk: Chunk) -> bool:
            tried.append(chunk)
            return fits(self, chunk)

        monkeypatch.setattr(RetainedChunks, "_fits", count)
        await bench.store.sweep()
        assert 0 < len(tried) <= 256
        await bench.store.sweep()
        assert len(set(tried)) == 500, "each chunk has its turn"
        bench.store.accounts.account_of(keys.tenant_id(b"a")).limits = TenantLimits()
        for _ in range(2):
            await bench.store.sweep()
        assert bench.store.accounts.account_of(keys.tenant_id(b"a")).retained_chunks == 500
        bench.clock.now += 1800
        await use(bench, [7], retain(bench, 3600), salt=b"a")
        bench.clock.now += 1801
        await bench.store.sweep()
        assert bench.store.accounts.account_of(keys.tenant_id(b"a")).retained_chunks == 1, "a use extended one"


async def test_a_smaller_budget_after_a_restart_spares_pinned_and_retained_chunks() -> None:
    """The start evicted for the budget before it read the pins, and deleted the pins of evicted chunks for good."""
    disk = MemoryTier()
    async with opened(arena_bytes=40 * SLOT, budget_bytes=40 * SLOT, tier=disk) as bench:
        bench.store.pin(bench.root(), await put(bench, [1, 2]))
        await put(bench, [3, 4], retain(bench, 3600))
        for i in range(30):
            await put(bench, [100 + i])
            await use(bench, [100 + i])
    async with opened(arena_bytes=40 * SLOT, budget_bytes=20 * SLOT, tier=disk) as bench:
        assert len(bench.store.tiers.index) < 32, "the budget is met at once"
        assert bench.store.stats().durable_bytes <= 20 * SLOT
        assert (known(bench, [1, 2]), known(bench, [3, 4])) == (2, 2)
        assert bench.store.stats().pinned_bytes > 0
        assert bench.store.stats().retained_bytes > 0
    async with opened(arena_bytes=40 * SLOT, budget_bytes=20 * SLOT, tier=disk) as bench:
        assert bench.store.stats().pinned_bytes > 0


async def test_the_end_of_a_session_ends_its_retentions() -> None:
    async with opened() as bench:
        hints = PromptHints(retained=((ALL, bench.clock.now + 3600),), group="agent")
        await put(bench, [1, 2], hints)
        assert await bench.store.groups.release(bench.root(), "agent") == 1
        assert bench.store.stats().retained_bytes == 0


async def test_a_tenants_own_ttl_wins_over_a_retention() -> None:
    async with opened(limits={b"a": TenantLimits(ttl_seconds=10)}) as bench:
        await put(bench, [1, 2], retain(bench, 3600), salt=b"a")
        bench.clock.now += 11
        await bench.store.sweep()
        assert known(bench, [1, 2], b"a") == 0


async def test_a_retention_survives_a_restart_and_ends_then() -> None:
    """The retention lasts as long as promised, at most a quarter longer, also after an earlier, shorter TTL."""
    disk, clock = MemoryTier(), FakeClock()
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT, tier=disk, clock=clock) as bench:
        first = await put(bench, [1, 2], PromptHints(expires_at=clock.now + 60))
        bench.store.ttl.persist_changes()
        await use(bench, [1, 2], retain(bench, 300))
        await put(bench, [3, 4])
        await put(bench, [5, 6], PromptHints(retained=((ALL, clock.now + 30),)))
        retained = {name for name in disk.notes() if name.startswith(NOTE_PREFIX)}
    disk.apply(WriteGroup(notes={EXPIRY_NOTE_PREFIX + first: encode_expiry(clock.now + 60)}))  # as after a kill
    clock.now += 200
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT, tier=disk, clock=clock) as bench:
        chunk = bench.store.find(bench.root(), first)
        assert chunk.is_retained
        assert clock.now + 100 <= chunk.retained_until <= clock.now + 175
        assert bench.store.stats().retained_bytes == chunk.size_bytes, "the third one's has ended"
        await bench.store.sweep()
        await flood(bench)
        assert (known(bench, [1, 2]), known(bench, [3, 4]), known(bench, [5, 6])) == (2, 0, 0)
        clock.now += 176
        await bench.store.sweep()
        assert bench.store.stats().retained_bytes == 0
    assert len(retained) == 2
    assert not any(name.startswith(NOTE_PREFIX) for name in disk.notes())


async def test_uses_that_renew_a_retention_write_few_deadlines() -> None:
    disk = MemoryTier()
    async with opened(tier=disk) as bench:
        key = NOTE_PREFIX + await put(bench, [1, 2], retain(bench, 3600))
        written = {disk.notes()[key]}
        for _ in range(100):
            bench.clock.now += 60
            await use(bench, [1, 2], retain(bench, 3600))
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            assert bench.store._writer is not None
            bench.store._writer.flush(done.set_result)
            await done
            written.add(disk.notes()[key])
            assert decode_expiry(disk.notes()[key]) >= bench.clock.now + 3600  # type: ignore[operator]
    assert 100 * 60 / (0.25 * 3600) <= len(written) <= 8


@pytest.mark.parametrize("limits", [None, {b"a": TenantLimits(arena_bytes=8 * SLOT, store_bytes=10 * SLOT)}])
async def test_low_priority_is_evicted_first_until_a_normal_use(limits: dict[bytes, TenantLimits] | None) -> None:
    async with opened(arena_bytes=16 * SLOT, budget_bytes=40 * SLOT, limits=limits) as bench:
        low = PromptHints(low_priority=True)
        await put(bench, [1], salt=b"a")
        for i in (2, 3):
            await put(bench, [i], low, salt=b"a")
            for _ in range(5):
                await use(bench, [i], low, salt=b"a")
        await use(bench, [3], salt=b"a")
        chunks = 8 if limits else 38  # what fits beside one chunk less than there are
        for i in range(chunks):
            await put(bench, [100 + i], salt=b"a")
        assert (known(bench, [2], b"a"), known(bench, [3], b"a")) == (0, 1)


async def test_an_entry_quota_evicts_low_priority_first_also_after_a_reload() -> None:
    async with opened(40 * SLOT) as bench:
        account = bench.store.accounts.account_of(keys.tenant_id(b"a"))
        for n in range(4):
            await put(bench, [n], PromptHints(low_priority=n == 2), salt=b"a")
        account.limits = TenantLimits(entries=4)
        bench.store.accounts.num_reloads += 1
        await bench.store.sweep()
        await put(bench, [4], salt=b"a")
        assert {n for n in range(5) if known(bench, [n], b"a")} == {0, 1, 3, 4}
        account.limits = TenantLimits()
        bench.store.accounts.num_reloads += 1
        await bench.store.sweep()
        await put(bench, [5], salt=b"a")
        assert bench.store.stats().chunks == 5


def test_a_killed_daemon_keeps_retentions(start: Callable[..., Node]) -> None:
    node = start()
    peer, hints = Peer(node), [pb.RetainedPrefix(end=1, retain_seconds=600)]
    for ids, retained in (([1, 2], hints), ([3, 4], [])):
        request = pb.ReserveRequest(session_id=peer.session, headers=[peer.header(ids)], retained=retained)
        (reserved,) = peer.stub.Reserve(request).reservations
        peer.staged(reserved.staging)[:] = payload_of(ids, reserved.staging.size_bytes)
        assert peer.commit(reserved).committed == 1
    node.settle()
    before = node.cache_stats().retained_bytes
    node.kill("daemon")
    peer.close()
    node.start_daemon()
    assert node.cache_stats().chunks == 2
    assert node.cache_stats().retained_bytes == before > 0


def test_hints_over_the_wire(start: Callable[..., Node]) -> None:
    peer = Peer(start())
    retained = [pb.RetainedPrefix(end=1, retain_seconds=600)]
    for ids, hints in (([1, 2], retained), ([3, 4], [])):
        request = pb.ReserveRequest(session_id=peer.session, headers=[peer.header(ids)], retained=hints, ttl_seconds=60)
        (reserved,) = peer.stub.Reserve(request).reservations
        peer.staged(reserved.staging)[:] = payload_of(ids, reserved.staging.size_bytes)
        assert peer.commit(reserved).committed == 1
    kept, other = sorted(peer.list_all(), key=lambda chunk: -chunk.ttl_seconds)
    assert 500 < kept.ttl_seconds <= 600, "a retained chunk does not expire before"
    assert other.ttl_seconds <= 60
    assert peer.stub.Stats(pb.StatsRequest()).retained_bytes == kept.payload_bytes
    for prefixes, named in (
        ([pb.RetainedPrefix(end=1, retain_seconds=2_592_001)], "retain_seconds is 2592001; at most 2592000"),
        ([pb.RetainedPrefix(end=1)] * 65, "retained.*65.*64"),
    ):
        match = pb.MatchRequest(session_id=peer.session, token_ids=[1], retained=prefixes)
        for call, message in (
            (peer.stub.Match, match),
            (peer.stub.Reserve, pb.ReserveRequest(session_id=peer.session, retained=prefixes)),
        ):
            with pytest.raises(grpc.RpcError, match=named) as refused:
                call(message)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
