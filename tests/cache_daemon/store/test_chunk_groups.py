"""Groups of chunks: a release removes what one session alone used, and nothing else."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from kvsidecar import keys

from cache_daemon.store.prompt_hints import PromptHints
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened


async def put(
    bench: Bench, ids: list[int], group: str, start: int = 0, parent: bytes = b"", salt: bytes = b""
) -> bytes:
    """Store a chunk for a group. Returns its hash."""
    header, kept = bench.header(ids, start, parent), PromptHints(group=group)
    reserved = bench.store.reserve(bench.session, salt, [header], kept)[0]
    if reserved.reservation_id:
        await bench.store.commit(bench.session, bench.store.epoch, [bench.fill(reserved, ids)])
    return reserved.prefix_hash


async def use(bench: Bench, ids: list[int], group: str = "", salt: bytes = b"") -> int:
    found = await bench.store.match(bench.session, salt, keys.token_bytes(ids), hints=PromptHints(group=group))
    bench.store.release(bench.session, [found.lease_id])
    return found.matched_tokens


def known(bench: Bench, ids: list[int], salt: bytes = b"") -> int:
    return sum(n for _, n in bench.store.probe(bench.root(salt), keys.token_bytes(ids)))


async def test_the_end_of_a_session_removes_its_chunks_from_memory_and_disk() -> None:
    async with opened() as bench:
        begin = await put(bench, [1, 2], "agent")
        await put(bench, [3, 4], "agent", 2, begin)
        await put(bench, [9], "")
        await bench.store.settle()
        assert await use(bench, [1, 2, 3, 4], "agent") == 4, "its own uses do not count"
        assert await bench.store.groups.release(bench.root(), "agent") == 2
        await bench.store.settle()
        assert (bench.store.stats().chunks, bench.store.stats().durable_chunks) == (1, 1)
        assert await bench.store.groups.release(bench.root(), "agent") == 0


async def test_chunks_that_others_used_or_continued_stay() -> None:
    async with opened() as bench:
        shared = await put(bench, [1, 2], "agent")
        await put(bench, [3], "agent", 2, shared)
        await put(bench, [4], "other", 2, shared)  # continues it
        read = await put(bench, [5, 6], "agent")
        await put(bench, [7], "agent", 2, read)
        assert await use(bench, [5, 6]) == 2  # a request without a session
        assert await bench.store.groups.release(bench.root(), "agent") == 2
        assert [known(bench, ids) for ids in ([1, 2, 3], [1, 2, 4], [5, 6, 7])] == [2, 3, 2]


async def test_a_session_of_another_tenant_with_the_same_name_is_another_one() -> None:
    async with opened() as bench:
        await put(bench, [1, 2], "agent", salt=b"a")
        await put(bench, [1, 2], "agent", salt=b"b")
        assert await bench.store.groups.release(bench.root(b"a"), "agent") == 1
        assert (known(bench, [1, 2], b"a"), known(bench, [1, 2], b"b")) == (0, 2)


async def test_pinned_and_leased_chunks_survive_a_release() -> None:
    async with opened() as bench:
        pinned = await put(bench, [1, 2], "agent")
        bench.store.pin(bench.root(), pinned)
        await put(bench, [3, 4], "agent")
        held = await bench.store.match(
            bench.session, b"", keys.token_bytes([3, 4]), hints=PromptHints(group="agent")
        )  # fmt: skip
        chunk = held.matches[0].chunk
        before = bytes(bench.store.arena.read(chunk.slot)) if chunk.slot is not None else b""
        assert await bench.store.groups.release(bench.root(), "agent") == 1
        assert (known(bench, [1, 2]), known(bench, [3, 4])) == (2, 0)
        assert chunk.slot is not None
        assert bytes(bench.store.arena.read(chunk.slot)) == before, "its reader is not done"
        bench.store.release(bench.session, [held.lease_id])


async def test_a_restart_forgets_groups_and_keeps_chunks() -> None:
    tier = MemoryTier()
    async with opened(tier=tier) as bench:
        await put(bench, [1, 2], "agent")
        await bench.store.settle()
    async with opened(tier=tier) as bench:
        assert await bench.store.groups.release(bench.root(), "agent") == 0
        assert known(bench, [1, 2]) == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "b"]), st.booleans()), max_size=25))
def test_a_release_leaves_what_anybody_else_touched(steps: list[tuple[int, str, bool]]) -> None:
    """Paths of a small tree are stored and used by two sessions and by requests without one."""

    async def run() -> None:
        users: dict[bytes, set[str]] = {}
        async with opened(40 * 4096) as bench:
            for which, group, stores in steps:
                path, parent, at = [[0], [which % 2], [which]][: 1 + which % 3], b"", 0
                if stores:
                    for ids in path:
                        parent = await put(bench, ids, group, at, parent)
                        users.setdefault(parent, set()).add(group)
                        at += len(ids)
                else:
                    whole = [token for ids in path for token in ids]
                    for chunk, _ in bench.store.probe(bench.root(), keys.token_bytes(whole)):
                        users[chunk.key].add(group)
                    await use(bench, whole, group)
            bench.store.check_integrity()
            await bench.store.groups.release(bench.root(), "a")
            left = {chunk.key for chunk in bench.store.tiers.index}
            assert left == {key for key, by in users.items() if by != {"a"}}

    asyncio.run(run())
