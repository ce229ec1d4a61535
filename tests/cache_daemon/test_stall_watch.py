"""What keeps the event loop is measured, and named in the log."""

from __future__ import annotations

import asyncio
import time

from structlog.testing import capture_logs

from cache_daemon.stalls import StallWatch


def compute_for(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_long_stall_is_measured_and_what_the_loop_did_is_told() -> None:
    with capture_logs() as logs:
        async with StallWatch() as stalls:
            await asyncio.sleep(0.1)
            assert stalls.worst_ms() < 600
            compute_for(0.7)
            await asyncio.sleep(0.1)
            assert stalls.worst_ms() > 600
    told = [line for line in logs if line["event"] == "the event loop stands still"]
    assert len(told) == 1, "once, not for every look"
    assert any("test_stall_watch.py" in call and "compute_for" in call for call in told[0]["at"])
    assert told[0]["computing_ms"] > 100


async def test_a_loop_that_waits_is_not_said_to_compute() -> None:
    with capture_logs() as logs:
        async with StallWatch():
            await asyncio.sleep(0.1)
            time.sleep(0.7)  # noqa: ASYNC251 - that is what is to be noticed
            await asyncio.sleep(0.1)
    [told] = [line for line in logs if line["event"] == "the event loop stands still"]
    assert told["computing_ms"] < 100
