"""Self-tests of the simulation: its clock, its threads, its disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cache_daemon.durable.durable_tier import TierFailed, WriteGroup
from tests.cache_daemon.simulation.disk import Disk, Drive
from tests.cache_daemon.simulation.loop import Order, SimulatedLoop, Stuck
from tests.cache_daemon.simulation.plan import Step, shrunk
from tests.cache_daemon.simulation.thread import (
    SimulatedCondition,
    SimulatedExecutor,
    SimulatedLock,
    SimulatedThread,
)


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    made = SimulatedLoop()
    made.enter()
    yield made
    made.cancel()
    made.end()


def test_time_passes_when_nothing_else_can_happen(loop: SimulatedLoop) -> None:
    began = loop.now
    loop.complete(asyncio.sleep(200), "sleeping")
    assert loop.now == began + 200


def test_what_never_ends_is_stuck(loop: SimulatedLoop) -> None:
    with pytest.raises(Stuck, match="waiting does not end"):
        loop.complete(asyncio.Event().wait(), "waiting")


def test_a_thread_waits_until_it_is_told_or_its_time_is_over(loop: SimulatedLoop) -> None:
    condition, seen = SimulatedCondition(loop.hub), list[tuple[bool, float]]()
    began = loop.now

    def work() -> None:
        for seconds in (5.0, None):
            with condition:
                told = condition.wait(seconds)
            seen.append((told, loop.now - began))

    SimulatedThread(loop.hub, work).start()
    loop.wait(10)
    assert seen == [(False, 5.0)]
    with condition:
        condition.notify()
    loop.some_turns(2)
    assert seen == [(False, 5.0), (True, 10.0)]


def test_the_loop_waits_for_a_lock_that_a_thread_has(loop: SimulatedLoop) -> None:
    lock, seen = SimulatedLock(loop.hub), list[str]()

    def work() -> None:
        with lock:
            seen.append("taken")
            loop.hub.pause()
            seen.append("given back")

    SimulatedThread(loop.hub, work).start()
    loop.some_turns(1)
    assert seen == ["taken"]
    with lock:
        assert seen == ["taken", "given back"]


def test_an_executor_has_so_many_threads_and_an_end(loop: SimulatedLoop) -> None:
    executor, running, most = SimulatedExecutor(loop.hub, 2), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        loop.hub.pause()
        running -= 1

    async def all_of_it() -> None:
        await asyncio.gather(*(loop.run_in_executor(executor, work) for _ in range(5)))

    loop.order = Order(3)
    loop.complete(all_of_it(), "the work")
    assert (running, most) == (0, 2)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(work)


def _interleaved(number: int) -> str:
    loop, seen = SimulatedLoop(), list[str]()
    loop.enter()

    def work(name: str) -> None:
        for _ in range(8):
            seen.append(name)
            loop.hub.pause()

    for name in "abc":
        SimulatedThread(loop.hub, work, (name,)).start()
    loop.order = Order(number)
    loop.some_turns(100)
    loop.end()
    return "".join(seen)


def test_an_order_decides_who_goes_next_and_always_alike() -> None:
    assert _interleaved(0) == "a" * 8 + "b" * 8 + "c" * 8
    assert _interleaved(1) == _interleaved(1)
    assert len({_interleaved(number) for number in range(1, 20)}) > 15


def test_a_crash_undoes_what_was_not_synced(loop: SimulatedLoop) -> None:
    disk = Disk(loop.hub)
    drive, executor = Drive(disk, loop.hub), SimulatedExecutor(loop.hub, 1)
    executor.submit(drive.apply, WriteGroup(notes={b"synced": b"1"}))
    loop.some_turns(20)
    written = executor.submit(drive.apply, WriteGroup(notes={b"written": b"1"}))
    loop.until(lambda: b"written" in disk.notes(), "writing")
    drive.cut()
    loop.some_turns(20)
    assert isinstance(written.exception(), TierFailed)
    assert disk.notes() == {b"synced": b"1"}


def test_a_plan_is_shrunk_to_the_steps_that_it_fails_by() -> None:
    plan = [Step(name, (), 1 + n) for n, name in enumerate("kaxxbxxxxcxxxx" * 3)]

    def fails(some: list[Step]) -> bool:
        names = "".join(one.name for one in some)
        return "a" in names and "c" in names[names.index("a") :]

    assert [(one.name, one.order) for one in shrunk(plan, fails)] in ([("a", 0), ("c", 0)],)
