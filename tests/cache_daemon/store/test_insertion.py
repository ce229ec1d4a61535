"""Insertion, the only path into the index: Commit, remote fetch and restart."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.eviction_policies import POLICIES
from cache_daemon.durable.durable_tier import Put, WriteGroup
from cache_daemon.eviction import Entry, LeastRecentlyUsed
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.reservations import ReserveResult
from cache_daemon.store.tier_manager import TierManager
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, cuts_of, node, prompt
from tests.cache_daemon.stores import Bench, opened

PAGE = 4096


def reserve(bench: Bench, ids: list[int], hints: PromptHints = NO_HINTS) -> list[tuple[ReserveResult, list[int]]]:
    """Reserve all chunks of a prompt at once, as a worker does."""
    headers, parent, parts = [], b"", []
    for start, end in pairwise([0, *cuts_of(ids)]):
        headers.append(bench.header(ids[start:end], start, parent))
        parts.append(ids[start:end])
        parent = keys.prefix_hash(parent or bench.root(), ids[start:end])
    return list(zip(bench.store.reserve(bench.session, b"", headers, hints), parts, strict=True))


async def commit(bench: Bench, reserved: list[tuple[ReserveResult, list[int]]]) -> Counter[str]:
    items = [bench.fill(r, part) for r, part in reserved]
    outcomes = await bench.store.commit(bench.session, bench.store.epoch, items)
    return Counter(pb.CommitOutcome.Name(outcome).removeprefix("COMMIT_OUTCOME_") for outcome in outcomes)


async def test_a_reserve_visits_each_ancestor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each header walked to the root, so one Reserve of copies of a deep chunk kept the daemon from all else."""
    async with opened(400 * PAGE, 800 * PAGE, staging_bytes=4 << 20) as bench:
        ids = prompt(300)
        agent = PromptHints(group="agent")
        assert (await commit(bench, reserve(bench, ids, agent)))["COMMITTED"] == 300
        last = bench.store.probe(bench.root(), keys.token_bytes(ids))[-1].chunk
        first = bench.store.tiers.index.path(last)[0]
        assert (first.group, last.group) == ("agent", "agent")
        visits, parent_of = 0, TierManager.parent_of

        def count(tiers: TierManager, chunk: Chunk) -> Chunk | None:
            nonlocal visits
            visits += 1
            return parent_of(tiers, chunk)

        monkeypatch.setattr(TierManager, "parent_of", count)
        header = bench.header(ids[-CHUNK:], len(ids) - CHUNK, last.parent_key)
        results = bench.store.reserve(bench.session, b"", [header] * 64)
        assert {r.outcome for r in results} == {pb.RESERVE_OUTCOME_ALREADY_STORED}
        assert visits <= 300 + 64
        assert (first.group, last.group) == ("", ""), "a caller without a group uses them all"


async def test_a_commit_of_what_a_remote_fetch_has_listed_meanwhile_lists_nothing_twice() -> None:
    engine, ids = InMemoryBackend(), prompt(4)
    async with node(engine) as a, node(engine) as b:
        reserved = reserve(b.bench, ids)
        await a.share(ids)
        assert (await b.ask(ids))[1].tokens == len(ids)
        assert await commit(b.bench, reserved) == {"COMMITTED": 4}
        stats = b.stats
        assert (stats.chunks, stats.tokens, stats.arena_chunks, stats.commits) == (4, len(ids), 4, 0)
        b.bench.store.check_integrity()
        assert await b.bench.found(ids) == len(ids)
        assert await b.bench.store.delete(b"", b"") == 4
        assert b.stats.arena_used_bytes == 0


async def test_a_fetch_of_what_a_commit_lists_meanwhile_lists_nothing_twice() -> None:
    engine, ids = InMemoryBackend(), prompt(4)
    async with node(engine) as a, node(engine) as b:
        await a.share(ids)
        reserved = reserve(b.bench, ids)
        finding = b.tier.find

        async def found_late(*rest: object) -> object:
            found = await finding(*rest)  # type: ignore[arg-type]
            assert await commit(b.bench, reserved) == {"COMMITTED": 4}
            return found

        b.tier.find = found_late  # type: ignore[assignment, method-assign]
        await b.ask(ids)
        assert b.stats.chunks == 4
        b.bench.store.check_integrity()


async def test_the_index_refuses_a_key_that_it_has() -> None:
    async with opened() as bench:
        key, _ = await bench.put([1, 2])
        there = bench.store.find(bench.root(), key)
        twin = Chunk(there.header, there.ids, there.tenant, arena_state=Residency.ABSENT)
        with pytest.raises(KeyError, match=key.hex()):
            bench.store.tiers.index.add(twin)
        bench.store.check_integrity()


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_a_commit_pushes_out_none_of_its_own_chunks(policy: str) -> None:
    """Nothing becomes durable here: what leaves the arena is gone."""
    async with opened(64 * PAGE, budget_bytes=0, new_policy=POLICIES[policy]) as bench:
        for turn in range(8):
            ids = prompt(40, turn)
            assert await commit(bench, reserve(bench, ids)) == {"COMMITTED": 40}
            assert await bench.found(ids) == len(ids)
        assert all(chunk.anchors == 0 for chunk in bench.store.tiers.index)


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_a_commit_does_not_push_out_the_chunk_that_it_continues(policy: str) -> None:
    async with opened(12 * PAGE, budget_bytes=0, new_policy=POLICIES[policy]) as bench:
        ids = prompt(10)
        assert await commit(bench, reserve(bench, ids[: 5 * CHUNK])) == {"COMMITTED": 5}
        fresh = [(r, part) for r, part in reserve(bench, ids) if r.reservation_id]
        assert len(fresh) == 5
        for other in range(7):
            await bench.put([10**6 + other])
        assert await commit(bench, fresh) == {"COMMITTED": 5}
        assert await bench.found(ids) == len(ids)


async def test_a_prompt_larger_than_the_arena_is_stored_as_far_as_it_fits() -> None:
    async with opened(10 * PAGE, budget_bytes=0) as bench:
        ids = prompt(16)
        assert await commit(bench, reserve(bench, ids)) == {"COMMITTED": 10, "ARENA_FULL": 6}
        assert await bench.found(ids) == 10 * CHUNK


async def test_a_prompt_larger_than_the_arena_is_stored_whole_where_it_becomes_durable() -> None:
    async with opened(10 * PAGE) as bench:
        ids = prompt(30)
        assert await commit(bench, reserve(bench, ids)) == {"COMMITTED": 30}
        assert sum(n for _, n in bench.store.probe(bench.root(), keys.token_bytes(ids))) == len(ids)


async def test_a_stored_chunk_that_does_not_begin_at_its_parents_end_is_not_listed_at_the_next_start() -> None:
    inner = MemoryTier()
    async with opened(tier=inner) as bench:
        assert await commit(bench, reserve(bench, prompt(3))) == {"COMMITTED": 3}
    found = list(inner.load())
    wrong = found[1].header
    wrong.start_position += 1
    inner.apply(WriteGroup(put=(Put(wrong, memoryview(inner._stored[wrong.prefix_hash].payload)),)))
    async with opened(tier=inner) as bench:
        assert await bench.found(prompt(3)) == CHUNK
        assert bench.store.stats().corrupt_chunks == 2, "it, and the one that continues it"
        await bench.store.delete(b"", b"")
    assert not inner.stored_keys()


async def test_a_prefix_in_use_is_evicted_after_an_unused_chunk() -> None:
    """Eviction heard of no use of a prefix that was continued again and again within less than 30 s."""
    async with opened(12 * PAGE, budget_bytes=0, new_policy=POLICIES["lru"]) as bench:
        parent, unused = b"", b""
        for turn in range(5):
            bench.clock.now += 20
            parent, _ = await bench.put([turn], turn, parent)
            unused = unused or (await bench.put([100]))[0]
        answers = bench.store.tiers.index.path(bench.store.find(bench.root(), parent))
        assert await bench.store.delete(bench.root(), answers[1].key) == 4
        for other in range(11):
            await bench.put([1000 + other])
        assert bench.store.tiers.index.get(unused) is None
        assert await bench.found([0]) == 1


async def test_commits_in_quick_succession_count_as_one_use_for_eviction() -> None:
    """Otherwise each group of one long prompt would count as a reuse of the groups before it."""
    touched: list[int] = []

    class Recorder(LeastRecentlyUsed):
        def touch(self, entry: Entry) -> None:
            touched.append(entry.start_position)
            super().touch(entry)

    async with opened(budget_bytes=0, new_policy=Recorder) as bench:
        parent = b""
        for turn in range(4):
            parent, _ = await bench.put([turn], turn, parent)
            bench.clock.now += 1
        assert touched == []
        bench.clock.now += 30
        await bench.put([4], 4, parent)
        assert touched == [3, 2, 1, 0]
