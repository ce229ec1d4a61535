"""The circuit breaker, hedged reads, and the latency model."""

from __future__ import annotations

import asyncio

import pytest
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from benchmarks.condition_wait import until_async
from cache_daemon.durable.encryption import NullCipher
from cache_daemon.remote.backend import RemoteBusy, RemoteFailed
from cache_daemon.remote.circuit_breaker import CircuitBreaker, CircuitState
from cache_daemon.remote.hedged_reads import HedgedReads
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.latency_model import LatencyModel
from cache_daemon.remote.remote_record import MAX_PARTS, RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend


def closed() -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.half_open()
    for _ in range(3):
        breaker.record_success()
    assert breaker.state is CircuitState.CLOSED
    return breaker


def test_it_begins_open_and_closes_after_some_successes() -> None:
    breaker = CircuitBreaker()
    assert not breaker.allows_calls
    breaker.half_open()
    assert (breaker.state, breaker.allows_calls) == (CircuitState.HALF_OPEN, True)
    breaker.record_success()
    assert breaker.state is CircuitState.HALF_OPEN
    breaker.record_success()
    breaker.record_success()
    assert (breaker.state, breaker.reason) == (CircuitState.CLOSED, "")


def test_three_failures_in_a_row_open_it() -> None:
    breaker = closed()
    assert [breaker.record_failure("x") for _ in range(3)] == [False, False, True]
    assert (breaker.allows_calls, breaker.reason, breaker.num_opened) == (False, "x", 1)


def test_a_success_between_failures_keeps_it_closed_until_half_of_them_fail() -> None:
    breaker = closed()
    failures = 0
    while breaker.allows_calls:
        breaker.record_success()
        breaker.record_failure("x")
        failures += 1
    assert 8 <= failures < 20


def test_half_open_one_failure_is_enough() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.record_failure("x")
    breaker.half_open()
    assert breaker.record_failure("y")
    assert (breaker.state, breaker.reason, breaker.num_opened) == (CircuitState.OPEN, "y", 2)


def test_half_open_three_calls_go_at_a_time() -> None:
    breaker = CircuitBreaker()
    assert breaker.begin_call() is None
    breaker.half_open()
    first = [breaker.begin_call() for _ in range(3)]
    assert (None not in first, breaker.begin_call(), breaker.trials_full) == (True, None, True)
    breaker.record_failure("x")
    assert (breaker.begin_call(), breaker.trials_full) == (None, False)
    breaker.half_open()
    second = [breaker.begin_call() for _ in range(3)]
    for call in first:
        breaker.end_call(call)
    assert breaker.begin_call() is None, "a call of before the circuit opened makes no room"
    breaker.end_call(second[0])
    assert breaker.begin_call() is not None
    for _ in range(3):
        breaker.record_success()
    assert None not in [breaker.begin_call() for _ in range(10)], "closed, all go"


# ---- hedging ------------------------------------------------------------------------------------------------


async def test_a_slow_read_is_asked_for_once_more_and_the_first_answer_counts() -> None:
    hedging, asked = HedgedReads(2), list[int]()

    async def work(lane: int) -> int:
        asked.append(lane)
        if len(asked) == 1:
            await asyncio.sleep(60)
        return lane

    found = await asyncio.wait_for(hedging.first_result(work, 0.01), 5)
    assert (found, len(set(asked)), hedging.num_hedged) == (asked[1], 2, 1)


async def test_what_fails_first_does_not_win() -> None:
    async def work(lane: int) -> str:
        first = not seen
        seen.append(lane)
        await asyncio.sleep(0.1 if first else 0.02)
        if not first:
            raise RemoteFailed("the second")
        return "good"

    seen = list[int]()
    assert await HedgedReads(2).first_result(work, 0.01) == "good"


async def test_when_all_fail_it_fails() -> None:
    async def work(lane: int) -> str:
        await asyncio.sleep(0.03)
        raise RemoteFailed("no")

    with pytest.raises(RemoteFailed):
        await HedgedReads(2).first_result(work, 0.01)


async def test_a_tenth_is_asked_for_twice_and_no_more() -> None:
    hedging, asked = HedgedReads(2), 0

    async def work(lane: int) -> int:
        nonlocal asked
        asked += 1
        for _ in range(20):  # longer than no patience at all, whatever the clock says
            await asyncio.sleep(0)
        return lane

    for _ in range(100):
        await hedging.first_result(work, 0.0)
    assert 4 + 9 <= hedging.num_hedged <= 4 + 10, "some at once, and then a tenth"
    assert asked == 100 + hedging.num_hedged


async def test_with_one_lane_nothing_is_asked_for_twice() -> None:
    hedging = HedgedReads(1)

    async def work(lane: int) -> int:
        await asyncio.sleep(0.02)
        return lane

    assert await hedging.first_result(work, 0.0) == 0
    assert hedging.num_hedged == 0


async def test_work_that_is_cancelled_by_itself_has_failed_and_its_caller_goes_on() -> None:
    """As when a client ends what it was asked for, because it connects anew."""

    async def work(lane: int) -> str:
        await asyncio.sleep(0.01)
        raise asyncio.CancelledError

    with pytest.raises(RemoteFailed):
        await HedgedReads(1).first_result(work, 60)

    async def once(lane: int) -> str:
        seen.append(lane)
        if len(seen) == 1:
            await asyncio.sleep(0.05)
            raise asyncio.CancelledError
        await asyncio.sleep(0.1)
        return "good"

    seen = list[int]()
    assert await HedgedReads(2).first_result(once, 0.01) == "good"


async def test_who_goes_away_takes_all_of_it_along() -> None:
    begun, ended = list[int](), list[int]()

    async def work(lane: int) -> None:
        begun.append(lane)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(lane)

    asking = asyncio.create_task(HedgedReads(2).first_result(work, 0.01))
    await until_async(lambda: len(begun) == 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert len(ended) == 2


# ---- figures ------------------------------------------------------------------------------------------------


def test_small_reads_say_what_a_round_trip_costs_and_large_ones_what_a_byte_does() -> None:
    figures = LatencyModel()
    assert figures.estimate_seconds(1 << 30) == 0, "nothing is known, so the best is hoped for"
    figures.record_round_trip(0.01)
    figures.record_transfer(100 << 20, 1.01)
    assert figures.latency_seconds == pytest.approx(0.01, rel=0.2)
    assert figures.bytes_per_second == pytest.approx(100 << 20, rel=0.05)
    assert figures.estimate_seconds(50 << 20, 2) == pytest.approx(0.52, rel=0.1)


def test_good_news_is_believed_sooner_than_bad() -> None:
    figures = LatencyModel()
    figures.record_round_trip(0.01)
    figures.record_round_trip(1.0)
    assert figures.latency_seconds < 0.3
    figures = LatencyModel()
    figures.record_timeout(1.0)
    for _ in range(5):
        figures.record_round_trip(0.001)
    assert figures.latency_seconds < 0.1


# ---- what a tier takes for an answer -------------------------------------------------------------------------


class Held(InMemoryBackend):
    """A backend whose reads succeed or fail on command."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = list[asyncio.Future[None]]()

    async def get_many(self, names, lane=0, max_bytes=()):  # type: ignore[no-untyped-def]
        self.reads.append(asyncio.get_running_loop().create_future())
        await self.reads[-1]
        return await super().get_many(names, lane, max_bytes)


async def test_an_engine_that_may_be_back_is_asked_by_few_of_many() -> None:
    """All others are told at once that it is away: few pay for an engine that accepts and does not answer."""
    engine = Held()
    tier = RemoteTier(engine, KeySchema("t"), NullCipher())
    tier.reads.half_open()
    calls = [asyncio.create_task(tier.find(b"r" * 32, [], 60)) for _ in range(50)]
    await until_async(lambda: sum(call.done() for call in calls) == 47)
    assert len(engine.reads) == 3
    assert {type(call.exception()) for call in calls if call.done()} == {RemoteBusy}
    assert (tier.counters.failures, tier.reads.state) == (0, CircuitState.HALF_OPEN), "what was not asked did not fail"
    trials = [call for call in calls if not call.done()]
    trials[0].cancel()
    await asyncio.wait({trials[0]})
    another = asyncio.create_task(tier.find(b"r" * 32, [], 60))
    await until_async(lambda: len(engine.reads) == 4)
    engine.reads[3].set_exception(RemoteFailed("no"))
    await asyncio.wait({another})
    assert tier.reads.state is CircuitState.OPEN
    for trial in trials[1:]:
        trial.cancel()
    await asyncio.wait(trials)


@pytest.mark.parametrize("well", [True, False])
async def test_a_call_of_before_an_engine_was_away_says_nothing_of_it_now(well: bool) -> None:
    engine = Held()
    tier = RemoteTier(engine, KeySchema("t"), NullCipher())
    tier.reads = closed()
    calls = [asyncio.create_task(tier.find(b"r" * 32, [], 60)) for _ in range(4)]
    while len(engine.reads) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for read in engine.reads[:3]:
        read.set_exception(RemoteFailed("it went away"))
    await asyncio.wait(calls[:3])
    assert tier.reads.state is CircuitState.OPEN
    tier.reads.half_open()
    for _ in range(2):
        tier.reads.record_success()
    if well:
        engine.reads[3].set_result(None)
    else:
        engine.reads[3].set_exception(RemoteFailed("its connection was of before"))
    await asyncio.wait(calls)
    assert tier.reads.state is CircuitState.HALF_OPEN
    tier.reads.record_success()
    assert tier.reads.state is CircuitState.CLOSED
    assert all(call.exception() is not None or well for call in calls)


async def test_records_that_claim_many_parts_are_not_asked_for_at_once() -> None:
    header = ChunkHeader(root=b"r" * 32, prefix_hash=b"h" * 32)
    entries = [RemoteRecord(header, 0, MAX_PARTS, 1, 0, 0, b"") for _ in range(3)] + [
        RemoteRecord(header, 0, 2, 9, 0, 0, b"")
    ] * 3
    groups = RemoteTier(InMemoryBackend(), KeySchema("t"), NullCipher()).group_by_call(entries)
    assert [len(group) for group in groups] == [1, 1, 1, 3]
