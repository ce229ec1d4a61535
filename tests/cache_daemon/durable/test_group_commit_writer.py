"""The writer keeps order, loses no removal, and tells everybody what became of their chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
import structlog

from benchmarks.condition_wait import until_async
from cache_daemon.durable import group_commit_writer
from cache_daemon.durable.durable_tier import OutOfSpace, Put, PutOutcome, PutResult, TierFailed, WriteGroup
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from tests.cache_daemon.doubles.faulty_tier import FaultyTier
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.durable.chunks import chain, chunk, is_sound, key_of, store

STORED, CANCELLED = PutOutcome.STORED, PutOutcome.CANCELLED


class Desk:
    """A writer with its tier; records the writer's reports."""

    def __init__(self, tier: FaultyTier) -> None:
        self.tier = tier
        self.writer = GroupCommitWriter(tier, asyncio.get_running_loop())
        self.heard: dict[bytes, PutOutcome] = {}

    def put(self, *puts: Put) -> None:
        for put in puts:
            view = memoryview(bytes(put.payload))
            self.writer.put(put.header, lambda view=view: view, put.replaces, lambda: 0, self._hear(key_of(put)))

    def _hear(self, key: bytes) -> Callable[[PutResult], None]:
        def hear(result: PutResult) -> None:
            assert key not in self.heard, "heard twice"
            assert (result.stored_bytes > 0) is (result.outcome is STORED)
            self.heard[key] = result.outcome

        return hear

    async def outcomes(self, *puts: Put) -> list[PutOutcome]:
        await until_async(lambda: all(key_of(put) in self.heard for put in puts))
        return [self.heard[key_of(put)] for put in puts]

    async def held(self) -> None:
        """Hold the writer in the middle of a transaction while the ``with`` block runs."""
        await until_async(lambda: self.tier.wait_until_held(0))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(FaultyTier(MemoryTier()))
    yield desk
    desk.tier.let_go()
    assert desk.writer.stop(20)


def keys_of(puts: Iterable[Put]) -> list[bytes]:
    return [key_of(put) for put in puts]


async def test_chunks_are_stored_many_to_a_transaction(desk: Desk) -> None:
    first, *others = chain(50)
    desk.tier.hold()
    desk.put(first)
    await desk.held()
    desk.put(*others)
    assert desk.writer.pending == 50
    desk.tier.let_go()
    assert await desk.outcomes(first, *others) == [STORED] * 50
    assert [len(group.put) for group in desk.tier.groups] == [1, 49]
    assert desk.writer.pending == 0


async def test_a_replacement_is_in_the_transaction_of_its_chunk(desk: Desk) -> None:
    old = chunk([1])
    new = chunk([1, 2], replaces=(key_of(old),))
    desk.put(old, new)
    assert await desk.outcomes(new) == [STORED]
    assert [put.replaces for group in desk.tier.groups for put in group.put if put.replaces] == [(key_of(old),)]
    assert not is_sound(desk.tier, old)


async def test_a_removal_cancels_what_is_not_yet_begun(desk: Desk) -> None:
    first, second = chunk([1]), chunk([2])
    desk.tier.hold()
    desk.put(first)
    await desk.held()
    desk.put(second)
    desk.writer.remove([key_of(second)])
    assert await desk.outcomes(second) == [CANCELLED], "it is told before the transaction that is under way ends"
    desk.put(second)
    desk.writer.remove(keys_of([first]))
    desk.heard.pop(key_of(second))
    desk.tier.let_go()
    assert await desk.outcomes(first, second) == [STORED, STORED]
    await until_async(lambda: not is_sound(desk.tier, first))
    assert is_sound(desk.tier, second), "what was put after its removal is there"


async def test_a_removal_does_not_wait_for_the_chunks_of_a_busy_store(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit_writer, "_GROUP_ITEMS", 1)
    old, young, *others = (chunk([i]) for i in range(12))
    desk.put(old)
    assert await desk.outcomes(old) == [STORED]
    desk.tier.hold()
    desk.put(young)
    await desk.held()
    desk.put(*others)
    desk.writer.remove([key_of(old)])
    heard: list[int] = []
    desk.writer.flush(lambda result: heard.append(len(desk.tier.groups)))
    desk.tier.let_go()
    assert await desk.outcomes(*others) == [STORED] * 10
    assert [n for n, group in enumerate(desk.tier.groups) if group.remove] == [2], "in the next transaction"
    assert heard


async def test_nothing_overtakes_removals_that_do_not_fit_one_transaction(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit_writer, "_GROUP_REMOVALS", 2)
    puts = [chunk([i]) for i in range(5)]
    desk.put(*puts)
    assert await desk.outcomes(*puts) == [STORED] * 5
    desk.tier.hold()
    desk.writer.note(b"first", b"")
    await desk.held()
    begun = len(desk.tier.groups)
    desk.writer.remove(keys_of(puts))
    desk.heard.clear()
    desk.put(puts[-1])
    desk.writer.note(b"mark", b"")
    heard: list[PutOutcome] = []
    desk.writer.flush(lambda result: heard.append(result.outcome))
    desk.tier.let_go()
    assert await desk.outcomes(puts[-1]) == [STORED]
    await until_async(lambda: heard == [STORED])
    assert is_sound(desk.tier, puts[-1]), "it came after its removal"
    assert desk.tier.usage().entries == 1
    removals = [n for n, group in enumerate(desk.tier.groups) if group.remove]
    marks = [n for n, group in enumerate(desk.tier.groups) if b"mark" in group.notes]
    assert len(removals) == 3
    assert begun <= removals[0] <= removals[-1] <= marks[0]


async def test_what_is_written_is_said_also_when_nothing_is_owed(desk: Desk) -> None:
    heard: list[PutOutcome] = []
    for _ in range(200):
        desk.writer.remove([b"x" * 32])
        desk.writer.flush(lambda result: heard.append(result.outcome))
        await asyncio.sleep(0)
        desk.writer.flush(lambda result: heard.append(result.outcome))
    await until_async(lambda: heard == [STORED] * 400)


async def test_removals_are_tried_until_they_succeed(desk: Desk) -> None:
    put = chunk([1])
    desk.put(put)
    assert await desk.outcomes(put) == [STORED]
    desk.tier.fail_applies(4)
    began = time.monotonic()
    desk.writer.remove([key_of(put)])
    await until_async(lambda: desk.writer.failing is not None)
    assert desk.writer.failing is not None
    assert "told to fail" in desk.writer.failing[0]
    await until_async(lambda: not is_sound(desk.tier, put))
    assert time.monotonic() - began > 0.1 + 0.2, "with growing pauses"
    await until_async(lambda: desk.writer.failing is None)


async def test_a_note_that_failed_is_told_and_tried_again(desk: Desk) -> None:
    heard: list[PutOutcome] = []
    desk.tier.fail_applies(2)
    desk.writer.note(b"verdict", b"passed", lambda result: heard.append(result.outcome))
    await until_async(lambda: desk.tier.notes() == {b"verdict": b"passed"})
    await until_async(lambda: heard == [PutOutcome.FAILED])


async def test_the_last_of_several_notes_wins(desk: Desk) -> None:
    heard: list[PutOutcome] = []
    for value in (b"1", None, b"3"):
        desk.writer.note(b"n", value, lambda result: heard.append(result.outcome))
    await until_async(lambda: heard == [STORED] * 3)
    assert desk.tier.notes() == {b"n": b"3"}


async def test_ticks_of_use_are_kept(desk: Desk) -> None:
    put = chunk([1])
    desk.put(put)
    desk.writer.used({key_of(put): 12})
    await desk.outcomes(put)
    desk.writer.used({key_of(put): 13, b"x" * 32: 1})
    await until_async(lambda: [loaded.last_use for loaded in desk.tier.load()] == [13])


async def test_without_room_removals_are_written_and_chunks_told() -> None:
    kept, big = chunk([1], payload=bytes(5000)), chunk([2], payload=bytes(50_000))
    small = chunk([3], payload=bytes(5000))
    desk = Desk(FaultyTier(MemoryTier(max_bytes=20_000)))
    store(desk.tier, kept)
    desk.tier.hold()
    desk.writer.note(b"first", b"")
    await desk.held()
    desk.put(small, big, child := chunk([4], parent=big))
    desk.writer.remove([key_of(kept)])
    desk.tier.let_go()
    assert await desk.outcomes(small, big, child) == [STORED, PutOutcome.OUT_OF_SPACE, PutOutcome.OUT_OF_SPACE]
    assert not is_sound(desk.tier, kept)
    assert is_sound(desk.tier, small)
    assert desk.writer.failing is not None
    desk.put(chunk([5]))
    await desk.outcomes(chunk([5]))
    assert desk.writer.failing is None, "a success clears it"
    assert desk.writer.stop(5)


async def test_one_bad_chunk_does_not_take_its_group_along(desk: Desk) -> None:
    class Poison(MemoryTier):
        def apply(self, group: WriteGroup) -> list[object]:  # type: ignore[override]
            if any(list(put.header.token_ids) == [666] for put in group.put):
                raise MemoryError("out of memory, or whatever a library raises")
            return super().apply(group)  # type: ignore[return-value]

    desk.tier.inner = Poison()
    puts = [chunk([i]) for i in range(660, 673)]
    children = [chunk([0], parent=put) for put in puts]
    desk.tier.hold()
    desk.put(chunk([1]))
    await desk.held()
    desk.put(*puts, *children)
    desk.tier.let_go()
    found = await desk.outcomes(*puts, *children)
    assert [outcome for outcome in found if outcome is not STORED] == [PutOutcome.FAILED, PutOutcome.PARENT_MISSING]
    assert found[6] is PutOutcome.FAILED


async def test_a_payload_that_cannot_be_had_fails_alone(desk: Desk) -> None:
    def raises() -> memoryview:
        raise ValueError("the slot is gone")

    heard: list[PutOutcome] = []
    desk.writer.put(chunk([1]).header, raises, (), lambda: 0, lambda result: heard.append(result.outcome))
    good = chunk([2])
    desk.put(good)
    assert await desk.outcomes(good) == [STORED]
    assert heard == [PutOutcome.FAILED]


@pytest.mark.parametrize("error", [TierFailed("x"), OutOfSpace("x"), MemoryError(), ValueError(), RuntimeError("x")])
async def test_nothing_that_a_tier_raises_ends_the_thread(desk: Desk, error: Exception) -> None:
    desk.tier.fail_applies(40, error)
    puts = [chunk([i]) for i in range(5)]
    desk.put(*puts)
    desk.writer.remove([b"x" * 32])
    desk.writer.note(b"n", b"v")
    assert STORED not in await desk.outcomes(*puts)
    desk.tier._apply_errors.clear()
    desk.put(later := chunk([9]))
    assert await desk.outcomes(later) == [STORED]
    await until_async(lambda: desk.tier.notes() == {b"n": b"v"})


async def test_views_of_the_arena_are_released(desk: Desk) -> None:
    """An arena cannot be unmapped while anything points into it."""
    put = chunk([1])
    arena = bytearray(put.payload)
    desk.tier.fail_applies(1)
    desk.writer.put(put.header, lambda: memoryview(arena), (), lambda: 0, desk._hear(key_of(put)))
    await desk.outcomes(put)
    arena += b"resized"  # raises BufferError while a view is left


async def test_the_loop_hears_of_a_group_in_one_call(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    loop = asyncio.get_running_loop()
    real = loop.call_soon_threadsafe

    def counted(*args: object) -> object:
        nonlocal calls
        calls += 1
        return real(*args)  # type: ignore[arg-type]

    desk.tier.hold()
    desk.put(chunk([1]))
    await desk.held()
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    puts = [chunk([2, i]) for i in range(100)]
    desk.put(*puts)
    desk.tier.let_go()
    await desk.outcomes(*puts)
    assert calls == 2


async def test_stopping_writes_what_is_queued() -> None:
    desk = Desk(FaultyTier(MemoryTier()))
    puts = chain(600, tokens=4)
    desk.put(*puts)
    assert desk.writer.stop(20)
    assert desk.tier.usage().entries == 600


async def test_stopping_ends_in_time_when_the_disk_does_not_answer() -> None:
    desk = Desk(FaultyTier(MemoryTier()))
    desk.tier.fail_applies(1000)
    desk.writer.remove([b"x" * 32])
    began = time.monotonic()
    assert not desk.writer.stop(0.5)
    assert time.monotonic() - began < 20, "a thousand tries take minutes"


async def test_an_outcome_that_cannot_be_taken_note_of_loses_no_other(desk: Desk) -> None:
    desk.tier.hold()
    puts = chain(3)
    desk.put(puts[0])
    await desk.held()

    def broken(_: PutResult) -> None:
        raise ValueError("planted")

    view = memoryview(bytes(puts[1].payload))
    desk.writer.put(puts[1].header, lambda: view, (), lambda: 0, broken)
    desk.put(puts[2])
    with structlog.testing.capture_logs() as lines:
        desk.tier.let_go()
        assert await desk.outcomes(puts[0], puts[2]) == [STORED, STORED]
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["callback of a durable write failed"]


async def test_a_write_that_does_not_end_is_a_failure_while_it_lasts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit_writer, "HUNG_SECONDS", 0.2)
    desk.tier.hold()
    puts = chain(3)
    desk.put(puts[0])
    await desk.held()
    desk.put(*puts[1:])
    await until_async(lambda: desk.writer.hung)
    assert desk.writer.failing is not None
    assert "the disk hangs" in desk.writer.failing[0]
    assert desk.writer.fail_queued() == 2
    assert await desk.outcomes(*puts[1:]) == [PutOutcome.FAILED] * 2
    assert desk.writer.pending == 1, "what is being written is not given up"
    desk.tier.let_go()
    assert await desk.outcomes(puts[0]) == [STORED]
    assert (desk.writer.failing, desk.writer.hung) == (None, False)
    desk.put(*(again := chain(3, seed=4)))
    assert await desk.outcomes(*again) == [STORED] * 3
