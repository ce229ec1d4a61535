"""What keeps the event loop is measured, and named in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from cache_daemon import event_loop_monitor
from cache_daemon.event_loop_monitor import EventLoopMonitor


def compute_for(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def wait_for(seconds: float) -> None:
    time.sleep(seconds)


def told_of(logs: list[MutableMapping[str, Any]], name: str) -> list[MutableMapping[str, Any]]:
    """Lines of stalls in a function of this file. A machine that others use too has stalls of its own."""
    told = [line for line in logs if line["event"] == "event loop stalled"]
    return [line for line in told if any("test_event_loop_monitor.py" in call and name in call for call in line["at"])]


async def test_a_long_stall_is_measured_and_what_the_loop_did_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_monitor, "_LOG_INTERVAL_SECONDS", 0.0)
    with capture_logs() as logs:
        async with EventLoopMonitor() as watch:
            await asyncio.sleep(0.1)
            compute_for(0.7)
            await asyncio.sleep(0.1)
            assert watch.max_stall_ms() > 600
    assert max(line["computing_ms"] for line in told_of(logs, "compute_for")) > 50


async def test_a_loop_that_waits_is_not_said_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop_monitor, "_LOG_INTERVAL_SECONDS", 0.0)
    with capture_logs() as logs:
        async with EventLoopMonitor():
            await asyncio.sleep(0.1)
            wait_for(1.5)
            await asyncio.sleep(0.1)
    told = told_of(logs, "wait_for")
    assert told
    assert all(line["computing_ms"] < 100 for line in told)
