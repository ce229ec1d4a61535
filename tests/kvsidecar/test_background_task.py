"""Background tasks: run beside other work, and tell of their failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvsidecar.process.background_task import BackgroundTask


def test_the_work_runs_and_has_ended_when_stop_returns() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def run() -> None:
        task = BackgroundTask(work)
        async with task:
            await asyncio.sleep(0)
        assert ended == [True]
        await task.stop()

    asyncio.run(run())


def test_an_error_is_reported_at_once_and_raised_by_stop() -> None:
    told: list[dict[str, Any]] = []

    async def work() -> None:
        raise OSError("broken")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        task = BackgroundTask(work)
        task.start()
        await asyncio.sleep(0.01)
        assert [str(context["exception"]) for context in told] == ["broken"]
        assert "work" in told[0]["message"]
        with pytest.raises(OSError, match="broken"):
            await task.stop()

    asyncio.run(run())


def test_a_cancelled_caller_of_stop_is_cancelled() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)

    async def run() -> None:
        task = BackgroundTask(work)
        task.start()
        await asyncio.sleep(0)
        stopping = asyncio.create_task(task.stop())
        await asyncio.sleep(0.01)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping

    asyncio.run(run())
