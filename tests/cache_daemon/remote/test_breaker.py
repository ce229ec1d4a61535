"""The circuit breaker, hedged reads, and what is measured."""

from __future__ import annotations

import asyncio

import pytest

from cache_daemon.remote.breaker import Breaker, Circuit
from cache_daemon.remote.engine import RemoteFailed
from cache_daemon.remote.figures import Figures
from cache_daemon.remote.hedging import Hedging


def closed() -> Breaker:
    breaker = Breaker()
    breaker.answered()
    for _ in range(3):
        breaker.succeeded()
    assert breaker.state is Circuit.CLOSED
    return breaker


def test_it_begins_open_and_closes_after_some_successes() -> None:
    breaker = Breaker()
    assert not breaker.allows
    breaker.answered()
    assert (breaker.state, breaker.allows) == (Circuit.HALF_OPEN, True)
    breaker.succeeded()
    assert breaker.state is Circuit.HALF_OPEN
    breaker.succeeded()
    breaker.succeeded()
    assert (breaker.state, breaker.why) == (Circuit.CLOSED, "")


def test_three_failures_in_a_row_open_it() -> None:
    breaker = closed()
    assert [breaker.failed("x") for _ in range(3)] == [False, False, True]
    assert (breaker.allows, breaker.why, breaker.opened) == (False, "x", 1)


def test_a_success_between_failures_keeps_it_closed_until_half_of_them_fail() -> None:
    breaker = closed()
    failures = 0
    while breaker.allows:
        breaker.succeeded()
        breaker.failed("x")
        failures += 1
    assert 8 <= failures < 20


def test_half_open_one_failure_is_enough() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.failed("x")
    breaker.answered()
    assert breaker.failed("y")
    assert (breaker.state, breaker.why, breaker.opened) == (Circuit.OPEN, "y", 2)


# ---- hedging ------------------------------------------------------------------------------------------------


async def test_a_slow_read_is_asked_for_once_more_and_the_first_answer_counts() -> None:
    hedging, asked = Hedging(2), list[int]()

    async def work(lane: int) -> int:
        asked.append(lane)
        if len(asked) == 1:
            await asyncio.sleep(60)
        return lane

    found = await asyncio.wait_for(hedging.first(work, 0.01), 5)
    assert (found, len(set(asked)), hedging.hedged) == (asked[1], 2, 1)


async def test_what_fails_first_does_not_win() -> None:
    async def work(lane: int) -> str:
        first = not seen
        seen.append(lane)
        await asyncio.sleep(0.1 if first else 0.02)
        if not first:
            raise RemoteFailed("the second")
        return "good"

    seen = list[int]()
    assert await Hedging(2).first(work, 0.01) == "good"


async def test_when_all_fail_it_fails() -> None:
    async def work(lane: int) -> str:
        await asyncio.sleep(0.03)
        raise RemoteFailed("no")

    with pytest.raises(RemoteFailed):
        await Hedging(2).first(work, 0.01)


async def test_at_most_a_tenth_is_asked_for_twice() -> None:
    hedging = Hedging(2)

    async def work(lane: int) -> int:
        await asyncio.sleep(0.004)
        return lane

    for _ in range(100):
        await hedging.first(work, 0.0)
    assert hedging.hedged <= 4 + 10


async def test_with_one_lane_nothing_is_asked_for_twice() -> None:
    hedging = Hedging(1)

    async def work(lane: int) -> int:
        await asyncio.sleep(0.02)
        return lane

    assert await hedging.first(work, 0.0) == 0
    assert hedging.hedged == 0


async def test_who_goes_away_takes_all_of_it_along() -> None:
    ended = list[int]()

    async def work(lane: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(lane)

    asking = asyncio.create_task(Hedging(2).first(work, 0.01))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert len(ended) == 2


# ---- figures ------------------------------------------------------------------------------------------------


def test_small_reads_say_what_a_round_trip_costs_and_large_ones_what_a_byte_does() -> None:
    figures = Figures()
    assert figures.seconds(1 << 30) == 0, "nothing is known, so the best is hoped for"
    figures.looked(0.01)
    figures.moved(100 << 20, 1.01)
    assert figures.latency_seconds == pytest.approx(0.01, rel=0.2)
    assert figures.bytes_per_second == pytest.approx(100 << 20, rel=0.05)
    assert figures.seconds(50 << 20, 2) == pytest.approx(0.52, rel=0.1)


def test_good_news_is_believed_sooner_than_bad() -> None:
    figures = Figures()
    figures.looked(0.01)
    figures.looked(1.0)
    assert figures.latency_seconds < 0.3
    figures = Figures()
    figures.timed_out(1.0)
    for _ in range(5):
        figures.looked(0.001)
    assert figures.latency_seconds < 0.1
