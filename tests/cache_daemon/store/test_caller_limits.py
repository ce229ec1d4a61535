"""Pins and leases of one caller: a share of the budgets, kept over restarts."""

from __future__ import annotations

import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import LimitExceeded, QuotaExceeded

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.store import pins
from cache_daemon.store.lookup import FetchHints
from cache_daemon.store.sessions import Session
from tests.cache_daemon.conftest import descriptor
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.remote.nodes import CHUNK, PRICE, cuts_of, node, prompt
from tests.cache_daemon.stores import Bench, opened

PAGE = 4096
COMMITTED = pb.COMMIT_OUTCOME_COMMITTED


def page_of(n: int) -> list[int]:
    """The tokens of a chunk of one page."""
    return list(range(n * 1000, n * 1000 + 32))


async def store_pages(bench: Bench, count: int, first: int = 0, salt: bytes = b"") -> list[bytes]:
    found = []
    for n in range(first, first + count):
        key, outcome = await bench.put(page_of(n), salt=salt)
        assert outcome == COMMITTED
        await bench.store.settle()
        found.append(key)
    return found


def pin_some(bench: Bench, chunks: list[bytes], caller: str, salt: bytes = b"") -> tuple[int, str]:
    """Pin until a refusal. Returns the number of pins, and the refusal."""
    for n, key in enumerate(chunks):
        try:
            bench.store.pin(bench.root(salt), key, caller)
        except QuotaExceeded as refusal:
            return n, str(refusal)
    return len(chunks), ""


def far(bench: Bench, owner: str) -> Session:
    """A session of a caller that maps no memory."""
    described = descriptor()
    return bench.store.open_session("t", described, keys.namespace_id(described), shares_memory=False, owner=owner)


# ---- pins ---------------------------------------------------------------------------------------------------


async def test_a_caller_pins_a_quarter_all_external_ones_three_and_the_private_socket_the_rest() -> None:
    async with opened(16 * PAGE, 128 * PAGE) as bench:  # 64 pages may be pinned
        chunks = await store_pages(bench, 68)
        pinned, refusal = pin_some(bench, chunks, "alice")
        assert (pinned, refusal) == (
            16,
            "the prefix has 4.0 KiB more to pin; this caller may pin 64.0 KiB in all, and 64.0 KiB are pinned already: "
            "unpin something first",
        )
        assert pin_some(bench, chunks[:16], "bob")[0] == 16, "the same chunks, each caller for itself"
        bench.store.unpin(bench.root(), chunks[0], "bob")
        bench.store.pin(bench.root(), chunks[0], "bob")
        assert pin_some(bench, chunks[16:], "carol")[0] == 16
        assert pin_some(bench, chunks[32:], "dave")[0] == 16
        pinned, refusal = pin_some(bench, chunks[48:], "eve")
        assert pinned == 0
        assert "callers beyond the private socket may pin 192.0 KiB" in refusal
        pinned, refusal = pin_some(bench, chunks[48:], "")
        assert pinned == 16
        assert "all callers together may pin 256.0 KiB" in refusal


async def test_a_tenants_own_quota_for_pins_counts_in_place_of_a_callers_share() -> None:
    limits = {b"a": TenantLimits(pin_bytes=24 * PAGE)}
    async with opened(16 * PAGE, 128 * PAGE, limits=limits) as bench:
        chunks = await store_pages(bench, 25, salt=b"a")
        pinned, refusal = pin_some(bench, chunks, "alice", b"a")
        assert pinned == 24
        assert "this tenant may pin 96.0 KiB" in refusal


async def test_one_caller_takes_a_quarter_of_the_number_of_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "_MAX_PINS", 8)
    async with opened(16 * PAGE, 1 << 20) as bench:
        chunks = await store_pages(bench, 9)
        pinned, refusal = pin_some(bench, chunks, "alice")
        assert (pinned, refusal) == (2, "this caller may have 2 pins, and 2 exist: unpin something first")
        assert pin_some(bench, chunks[:1] * 3, "alice")[0] == 3, "one pin, counted"
        assert pin_some(bench, chunks, "bob")[0] == 2
        assert pin_some(bench, chunks[2:], "carol")[0] == 2
        assert pin_some(bench, chunks[4:], "dave") == (
            0,
            "callers beyond the private socket may have 6 pins, and 6 exist: unpin something first",
        )
        assert pin_some(bench, chunks[4:], "")[0] == 2


async def test_without_a_durable_copy_one_caller_parks_an_eighth_of_the_arena() -> None:
    async with opened(32 * PAGE, 1 << 20) as bench:
        await bench.store.settle()
        bench.tier.hold()
        chunks = [(await bench.put(page_of(n)))[0] for n in range(17)]
        pinned, refusal = pin_some(bench, chunks, "alice")
        assert pinned == 4
        assert "this caller may pin 16.0 KiB of the arena while they are not durable" in refusal
        for caller, at in (("bob", 4), ("carol", 8)):
            assert pin_some(bench, chunks[at:], caller)[0] == 4
        assert pin_some(bench, chunks[12:], "dave")[0] == 0
        assert pin_some(bench, chunks[12:], "")[0] == 4
        bench.tier.let_go()
        await bench.store.settle()
        assert pin_some(bench, chunks[4:5], "alice")[0] == 1, "it is durable now"


async def test_a_longer_chunk_takes_no_pins_over_that_would_fill_the_arena() -> None:
    async with opened(16 * PAGE, 1 << 20) as bench:
        chunks = await store_pages(bench, 12)
        assert pin_some(bench, chunks, "")[0] == 12
        bench.tier.hold()
        for n in range(12):
            await bench.put([*page_of(n), 7])  # two pages each, in the arena alone
            assert bench.store.tiers.arena_only_pins_bytes <= 8 * PAGE
        bench.tier.let_go()
        await bench.store.settle()
        for n in range(12):
            assert bench.store.unpin(bench.root(), chunks[n]) == 1


async def test_pins_of_an_earlier_start_count_for_their_caller_and_respect_a_smaller_budget() -> None:
    tier = MemoryTier()
    async with opened(16 * PAGE, 128 * PAGE, tier=tier) as bench:
        chunks = await store_pages(bench, 20)
        assert pin_some(bench, chunks, "alice")[0] == 16
        await bench.store.settle()
    async with opened(16 * PAGE, 128 * PAGE, tier=tier) as bench:
        assert bench.store.stats().pinned_bytes == 16 * PAGE
        assert pin_some(bench, chunks[16:], "alice")[0] == 0
        assert pin_some(bench, chunks[16:], "bob")[0] == 4
        await bench.store.settle()
    for _ in range(2):
        async with opened(16 * PAGE, 64 * PAGE, tier=tier) as bench:
            assert bench.store.stats().pinned_bytes == 12 * PAGE, "alice's quarter, and bob's four"
            assert pin_some(bench, chunks[16:], "bob")[0] == 4
            for key in chunks[16:]:
                bench.store.unpin(bench.root(), key, "bob")
            await bench.store.settle()


async def test_what_pins_of_an_earlier_start_count_for_is_given_back_with_them() -> None:
    tier = MemoryTier()
    async with opened(16 * PAGE, 32 * PAGE, tier=tier) as bench:
        chunks = await store_pages(bench, 8)
        assert pin_some(bench, chunks, "alice")[0] == 4
        await bench.store.settle()
    async with opened(16 * PAGE, 32 * PAGE, tier=tier) as bench:
        bench.store.unpin(bench.root(), chunks[0], "alice")
        assert await bench.store.delete(bench.root(), chunks[1]) == 1
        assert pin_some(bench, chunks[4:], "alice")[0] == 2


# ---- leases -------------------------------------------------------------------------------------------------


async def test_far_sessions_of_one_caller_lease_a_quarter_of_the_arena() -> None:
    async with opened(16 * PAGE, 128 * PAGE) as bench:
        await store_pages(bench, 12)
        sessions = [far(bench, "alice"), far(bench, "alice"), far(bench, "bob"), far(bench, "carol")]
        found = []
        for n in range(12):
            for session in sessions[:2]:
                found.append((await bench.store.match(session, b"", keys.token_bytes(page_of(n)))).matched_tokens)
        assert found == [32] * 8 + [0] * 16, "a chunk that two sessions lease counts once"
        for n in range(4, 12):
            await bench.store.match(sessions[2], b"", keys.token_bytes(page_of(n)))
        found = [(await bench.store.match(sessions[3], b"", keys.token_bytes(page_of(11)))).matched_tokens]
        assert found == [0], "half of the arena is leased"
        for n in range(100, 108):
            assert (await bench.put(page_of(n), salt=b"victim"))[1] == COMMITTED
        await bench.store.settle()
        assert await bench.found(page_of(100), b"victim") == 32, "cold or not"
        bench.store.close_session(sessions[1])
        assert (await bench.store.match(sessions[0], b"", keys.token_bytes(page_of(11)))).matched_tokens == 0
        bench.store.close_session(sessions[0])
        assert (await bench.store.match(sessions[3], b"", keys.token_bytes(page_of(11)))).matched_tokens == 32
        for session in sessions[2:]:
            bench.store.close_session(session)


async def test_a_prompt_beyond_a_callers_share_is_leased_as_far_as_it_goes() -> None:
    async with opened(16 * PAGE, 128 * PAGE) as bench:
        prompt, parent = [], b""
        for n in range(8):
            parent, outcome = await bench.put(page_of(n), start=len(prompt), parent=parent)
            assert outcome == COMMITTED
            prompt += page_of(n)
        session, ids = far(bench, "alice"), keys.token_bytes(prompt)
        for _ in range(3):
            result = await bench.store.match(session, b"", ids)
            assert result.matched_tokens == 4 * 32
            again = await bench.store.match(session, b"", ids)
            assert again.matched_tokens == 4 * 32, "the same chunks once more"
            tail = await bench.store.match(session, b"", ids, window=32)
            assert tail.matched_tokens == 4 * 32, "a match without a window after four windows that do not fit"
            assert bench.store.release(session, [result.lease_id, again.lease_id, tail.lease_id]) == 3
        inside = [(32 * n, 32) for n in range(5, 8)]
        probes = [7, *prompt]
        result = await bench.store.match(session, b"", keys.token_bytes(probes), [(1 + at, n) for at, n in inside])
        assert len(result.contents) == 3
        more = await bench.store.match(session, b"", keys.token_bytes(probes), [(1, 32), (33, 32)])
        assert len(more.contents) == 1
        bench.store.close_session(session)


async def test_a_fetch_that_outlives_its_lease_still_counts() -> None:
    async with opened(16 * PAGE, 128 * PAGE) as bench:
        await store_pages(bench, 6)
        session = far(bench, "alice")
        leases = [await bench.store.match(session, b"", keys.token_bytes(page_of(n))) for n in range(4)]
        chunks = [m.chunk for result in leases for m in result.matches]
        with bench.store.acquire(session, chunks):
            bench.store.sessions.expire_leases(older_than_seconds=-1)
            assert not session.leases
            result = await bench.store.match(session, b"", keys.token_bytes(page_of(5)))
            assert result.matched_tokens == 0
            with pytest.raises(LimitExceeded, match=r"may lease 16\.0 KiB of the arena; this one leases 16\.0 KiB"):
                async with bench.store.reader.promoted(
                    bench.store.tiers.index.match(bench.root(), keys.token_bytes(page_of(5)))[0].chunk,
                    bench.store.sessions.leased_by("alice"),
                ):
                    pass
        result = await bench.store.match(session, b"", keys.token_bytes(page_of(5)))
        assert result.matched_tokens == 32
        bench.store.close_session(session)


async def test_a_fetch_from_the_remote_tier_ends_at_a_callers_share() -> None:
    engine, ids = InMemoryBackend(), prompt(8)
    async with node(engine) as a, node(engine, arena_bytes=16 * PAGE) as b:
        await a.share(ids)
        session, hints = far(b.bench, "alice"), FetchHints(cuts_of(ids), PRICE, 5.0)
        assert session.usage is not None
        assert (await b.bench.put(page_of(100), salt=b"x"))[1] == COMMITTED
        leased = await b.bench.store.match(session, b"x", keys.token_bytes(page_of(100)))
        brought = await b.remote.fetch(session, b"", keys.token_bytes(ids), hints)
        assert brought.tokens == 3 * CHUNK, "a quarter of the arena, with the chunk that is leased"
        assert session.usage.size_bytes == PAGE
        b.bench.store.release(session, [leased.lease_id])
        b.tier.group_by_call = lambda entries: [[e] for e in entries]  # type: ignore[method-assign]
        assert (await b.remote.fetch(session, b"", keys.token_bytes(ids), hints)).tokens == 4 * CHUNK
        b.bench.store.close_session(session)
