"""Fairness: one caller can neither fill the arena for good nor block the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import QuotaExceeded

from benchmarks.eviction_policies import POLICIES
from cache_daemon.auth.principal import GUEST, Principal
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.eviction.eviction_policy import Entry
from cache_daemon.eviction.lru import LeastRecentlyUsed
from cache_daemon.store import yield_timer
from cache_daemon.store.chunk import Residency
from cache_daemon.store.disk_evictor import _MAX_EXTRA_EVICTIONS
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.sessions import Session
from tests.cache_daemon.conftest import descriptor
from tests.cache_daemon.stores import Bench, opened

PAGE = 4096
COMMITTED = pb.COMMIT_OUTCOME_COMMITTED


async def test_pins_of_more_than_the_arena_keep_nobody_from_storing_and_reading() -> None:
    async with opened(8 * PAGE, 64 * PAGE) as bench:
        await bench.put([1], salt=b"victim")
        await bench.store.settle()
        for n in range(16):
            key, outcome = await bench.put([100 + n])
            assert outcome == COMMITTED
            await bench.store.settle()
            bench.store.pin(bench.root(), key)
        assert bench.store.stats().pinned_bytes > 0
        assert await bench.found([1], b"victim") == 1
        _, outcome = await bench.put([2], salt=b"victim")
        assert outcome == COMMITTED
        for n in range(16):
            assert await bench.found([100 + n]) == 1, "what is pinned comes from the disk"


async def test_no_more_than_half_of_the_arena_is_pinned_where_nothing_is_durable() -> None:
    async with opened(8 * PAGE, budget_bytes=0) as bench:
        refused = 0
        for n in range(24):
            key, outcome = await bench.put([100 + n])
            assert outcome == COMMITTED, "others find room"
            try:
                bench.store.pin(bench.root(), key)
            except QuotaExceeded:
                refused += 1
        pinned = [c for c in bench.store.tiers.index if c.pins]
        assert refused
        assert len(pinned) == 4, "each takes a page"
        assert all(c.arena_state is Residency.PRESENT for c in pinned)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_reload_of_limits_moves_stored_chunks_to_other_partitions(policy: str) -> None:
    """Chunks of a tenant that lost its quota stayed in its partition, from which no other tenant evicts."""
    tenant, quota = keys.tenant_id(b"a"), TenantLimits(arena_bytes=12 * PAGE, store_bytes=30 * PAGE)
    limits = {tenant: quota}
    async with opened(16 * PAGE, 32 * PAGE, new_policy=POLICIES[policy]) as bench:
        bench.store.accounts._limits_of = lambda account: limits.get(account, TenantLimits())
        await bench.put([1], salt=b"b")
        for n in range(0, 12, 2):
            parent = (await bench.put([100 + n], salt=b"a"))[0]
            await bench.put([101 + n], start=1, parent=parent, salt=b"a")
            await bench.store.settle()
        limits[tenant] = TenantLimits()
        bench.store.accounts.reload()
        await bench.store.sweep()
        stored = [(await bench.put([200 + n], salt=b"b"))[0] for n in range(10)]
        chunks = [bench.store.find(bench.root(b"b"), key) for key in stored]
        assert sum(chunk.arena_state is Residency.PRESENT for chunk in chunks) >= 10
        await bench.store.settle()
        for n in range(30):
            await bench.put([300 + n], salt=b"b")
            await bench.store.settle()
        tiers = bench.store.tiers
        assert tiers.disk_quotas is not None
        assert sum(chunk.root == bench.root(b"a") for chunk in tiers.index) < 12, "also on disk"
        limits[tenant] = quota
        await bench.put([400], salt=b"a")
        bench.store.accounts.reload()
        await bench.store.sweep()
        account = bench.store.accounts.account_of(tenant)
        own = [chunk for chunk in tiers.index if chunk.tenant is account]
        assert own
        assert tiers.arena_quotas.usage_of(account) == PAGE * sum(c.arena_state is Residency.PRESENT for c in own)
        assert tiers.disk_quotas.usage_of(account) > 0


async def test_a_chunk_deleted_while_new_limits_are_applied_is_not_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yield_timer, "_SLICE_SECONDS", -1.0)  # yields after each chunk
    limits = TenantLimits()
    async with opened() as bench:
        bench.store.accounts._limits_of = lambda _: limits
        await bench.store._upkeep.stop()
        for n in range(5):
            await bench.put([n])
        await bench.store.settle()
        limits = TenantLimits(ttl_seconds=10)
        bench.store.accounts.reload()
        sweep = asyncio.ensure_future(bench.store.sweep())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not sweep.done()
        for chunk in list(bench.store.tiers.index):
            bench.store.tiers.remove_subtree(chunk, LossCause.DELETED)
        await sweep
        bench.clock.now += 11
        await bench.store.sweep()
        bench.store.check_integrity()


async def test_a_prefix_that_is_not_durable_yet_takes_at_most_half_of_the_arena() -> None:
    async with opened(8 * PAGE, 64 * PAGE) as bench:
        bench.tier.hold()
        found = [(await bench.put([n]))[0] for n in range(5)]
        for key in found[:4]:
            bench.store.pin(bench.root(), key)
        with pytest.raises(QuotaExceeded, match="not durable"):
            bench.store.pin(bench.root(), found[4])
        bench.tier.let_go()
        await bench.store.settle()
        bench.store.pin(bench.root(), found[4])


# ---- a writer's word on what its chunks are worth -----------------------------------------------------------


async def put_claiming(
    bench: Bench, ids: list[int], seconds: float, salt: bytes, session: Session | None = None
) -> None:
    session, header = session or bench.session, bench.header(ids)
    header.prefill_seconds = seconds
    reserved = bench.store.reserve(session, salt, [header])[0]
    await bench.store.commit(session, bench.store.epoch, [bench.fill(reserved, ids, session)])


def open_external(bench: Bench, owner: Principal, model: str = "") -> Session:
    """Open a caller's session, in its own namespace if it names a model."""
    described = descriptor(model) if model else descriptor()
    return bench.store.open_session("t", described, keys.namespace_id(described), shares_memory=False, owner=owner)


@pytest.mark.parametrize("policy", ["gittins", "gdsf"])
@pytest.mark.parametrize("claim", [3e38, 1e4])
async def test_a_claim_of_what_prefill_took_does_not_keep_the_arena(policy: str, claim: float) -> None:
    async with opened(256 * PAGE, budget_bytes=0, new_policy=POLICIES[policy]) as bench:
        for n in range(256):
            await put_claiming(bench, [1_000_000 + n], claim, b"guest")
        for n in range(1200):
            await put_claiming(bench, [n], 0.01, b"honest")
        guests = sum([await bench.found([1_000_000 + n], b"guest") for n in range(256)])
        assert guests <= 8, "of 256"


@pytest.mark.parametrize("model", ["", "guests-own"])
@pytest.mark.parametrize("honest", [None, Principal("alice")])
@pytest.mark.parametrize(("ratio", "most"), [(1, 128), (4, 208)])
async def test_a_caller_that_inserts_more_does_not_set_the_bound_of_its_claims(
    honest: Principal | None, ratio: int, most: int, model: str
) -> None:
    """It holds its share of the insertions; ``honest`` None is a worker on the private socket."""
    async with opened(256 * PAGE, budget_bytes=0) as bench:
        guest = open_external(bench, GUEST, model)
        writer = bench.session if honest is None else open_external(bench, honest)
        stored = 0
        for n in range(-256, 600):
            if n >= 0:
                await put_claiming(bench, [n], 0.01, b"honest", writer)
            for _ in range(ratio if n >= 0 else 1):
                await put_claiming(bench, [1_000_000 + stored], 3e38, b"guest", guest)
                stored += 1
        tenant = keys.tenant_id(b"guest")
        assert sum(c.header.tenant == tenant for c in bench.store.tiers.index) <= most, "of 256"


# ---- the event loop -----------------------------------------------------------------------------------------


async def test_a_prompt_that_is_stored_in_many_ways_is_looked_up_in_bounded_steps() -> None:
    """Eleven equal tokens, cut into pieces of one, two and three in every way."""
    async with opened(16 << 20, budget_bytes=0, staging_bytes=16 << 20) as bench:
        parents = [(b"", 0)]
        for parent, at in parents:
            pieces = [[7] * n for n in (1, 2, 3) if at + n <= 11]
            reserved = bench.store.reserve(bench.session, b"", [bench.header(p, at, parent) for p in pieces])
            items = [bench.fill(r, p) for r, p in zip(reserved, pieces, strict=True)]
            await bench.store.commit(bench.session, bench.store.epoch, items)
            parents += [
                (r.prefix_hash, at + len(p))
                for r, p in zip(reserved, pieces, strict=True)
                if bench.store.tiers.index.get(r.prefix_hash) is not None
            ]
            if len(parents) > 1500:
                break
        index, looked = bench.store.tiers.index, 0
        continuations = index._continuations

        def counted(*rest: object) -> object:
            nonlocal looked
            looked += 1
            return continuations(*rest)  # type: ignore[arg-type]

        index._continuations = counted  # type: ignore[method-assign, assignment]
        took = []
        for _ in range(3):  # a collection of garbage may come into one
            looked, began = 0, time.thread_time()
            assert sum(n for _, n in bench.store.probe(bench.root(), keys.token_bytes([7] * 11))) > 0
            assert looked <= 256
            took.append(time.thread_time() - began)
        assert min(took) < 0.05


async def test_a_full_budget_evicts_a_bounded_number_of_chunks_at_once() -> None:
    async with opened(4 << 20, 64 << 20) as bench:
        for n in range(400):
            await bench.put([n])
        await bench.store.settle()
        persistence, before = bench.store._persistence, bench.store.stats().durable_evictions
        assert persistence is not None
        evictor = persistence.evictor
        evictor.budget_bytes = bench.store.stats().durable_bytes
        evictor._max_bytes = float(evictor.budget_bytes // 2)
        evictor._target_bytes = evictor._max_bytes
        evictor._shrink_some()
        assert bench.store.stats().durable_evictions - before == _MAX_EXTRA_EVICTIONS
        while bench.store.stats().durable_bytes > evictor._max_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("durable", [True, False])
async def test_an_entry_quota_evicts_without_a_scan_of_other_tenants_chunks(durable: bool) -> None:
    """Each insertion at the limit walked all chunks of the shared partition that eviction prefers."""
    offered = 0

    class Counted(LeastRecentlyUsed):
        def victims(self) -> Iterator[Entry]:
            nonlocal offered
            for entry in super().victims():
                offered += 1
                yield entry

    limits = {b"a": TenantLimits(entries=4)}
    async with opened(400 * PAGE, 4 << 20 if durable else 0, new_policy=Counted, limits=limits) as bench:
        for n in range(300):
            await bench.put([n], salt=b"other")
        for n in range(24):
            assert (await bench.put([n], salt=b"a"))[1] == COMMITTED
            await bench.store.settle()
        assert offered <= 24 * 4
        assert {n for n in range(24) if await bench.found([n], b"a")} == {20, 21, 22, 23}
