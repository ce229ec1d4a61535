"""Event loop of a simulation, with its own clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.cache_daemon.simulation.thread import Hub, SimulatedExecutor

# The clock's first value; large enough that no time in the past is negative.
_FIRST_SECONDS = 1000.0
# A reading of the clock takes the first time. Sometimes it takes the second, like a longer piece of work.
_READING_SECONDS, _SLOW_SECONDS = 1e-6, 0.005
# If a wait has not ended after this many virtual seconds or steps, it never will.
_PATIENCE_SECONDS, _MOST_TURNS = 300.0, 200_000
_MOST_JUMP_SECONDS = 5.0
# A task that still runs after this many cancellations waits for work that has already ended.
_CANCELLED_ENOUGH = 5


class Stuck(AssertionError):
    """The simulation has no more work although a test waits, or it does not end."""


class Order:
    """Random choice of the callback, thread or timer that runs next; ``number`` is the seed.

    Number 0 is the plain order without random choices: first the loop, then threads in their order, and no early timer.
    """

    def __init__(self, number: int) -> None:
        self.random = Random(number)
        self._plain = number == 0

    def choose(self, count: int) -> int:
        return 0 if self._plain or count < 2 else int(self.random.random() * count)

    def chance(self, share: float) -> bool:
        return not self._plain and self.random.random() < share


class SimulatedLoop(asyncio.BaseEventLoop):
    """An asyncio loop with virtual time. Time passes when no work can run, or when the ``Order`` says so.

    Callbacks of ``call_soon`` run in order, because asyncio guarantees that and the store relies on it. The ``Order``
    chooses what the operating system would decide: when a thread continues, when its result arrives, and whether a
    timer fires before a slow thread ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.order, self.turns = _FIRST_SECONDS, Order(0), 0
        self.hub = Hub(self)
        self._default_executor = SimulatedExecutor(self.hub, 8)  # type: ignore[assignment]
        self.set_exception_handler(self._note)
        self.errors: list[str] = []
        self._is_entered = False

    # ---- the clock ------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def read_clock(self) -> float:
        """Return the time, as ``time.monotonic`` does; the call itself takes some virtual time."""
        self.now += _SLOW_SECONDS if self.order.chance(0.02) else _READING_SECONDS
        return self.now

    # ---- methods that asyncio calls ---------------------------------------------------------------------------

    def _write_to_self(self) -> None:
        """Do nothing: no thread waits in a selector."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        chosen = executor if executor is not None else self._default_executor
        return asyncio.wrap_future(chosen.submit(func, *args), loop=self)

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {type(error).__name__}: {error}")

    def enter(self) -> None:
        """Make this the running loop while a step calls the store's code directly."""
        asyncio._set_running_loop(self)
        self._is_entered = True

    def leave(self) -> None:
        asyncio._set_running_loop(None)
        self._is_entered = False

    # ---- progress -------------------------------------------------------------------------------------------

    def turn(self, until: float = float("inf")) -> bool:
        """Run one callback or one thread.

        If nothing can run, time advances to the next event, but not beyond ``until``. Returns False if there is no
        event by then.
        """
        self.turns += 1
        if self.order.chance(0.01):
            self._jump(min(until, self.now + _MOST_JUMP_SECONDS))
        while True:
            self._due()
            threads = self.hub.ready()
            count = len(threads) + bool(self._ready)
            if count:
                break
            if not self._jump(until):
                return False
        chosen = self.order.choose(count)
        if self._ready:
            if chosen == 0:
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
                return True
            chosen -= 1
        self.hub.resume(threads[chosen])
        return True

    def _due(self) -> None:
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0]._when <= self.now):
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            if handle._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(handle)

    def _jump(self, until: float) -> bool:
        """Advance the time to the next event. Returns False if there is none until ``until``."""
        self._due()
        times = [self._scheduled[0]._when] if self._scheduled else []
        deadline = self.hub.next_deadline()
        if deadline is not None:
            times.append(deadline)
        if not times or min(times) > until:
            return False
        self.now = max(self.now, min(times))
        return True

    def some_turns(self, count: int) -> None:
        """Run up to ``turns`` callbacks or threads without advancing the time."""
        for _ in range(count):
            if not self.turn(self.now):
                return

    def until(self, done: Callable[[], bool], why: str, seconds: float = _PATIENCE_SECONDS) -> None:
        """Run until a condition holds. Raises Stuck."""
        end, last = self.now + seconds, self.turns + _MOST_TURNS
        while not done():
            if not self.turn(end) or self.now > end or self.turns > last:
                if done():
                    return
                raise Stuck(f"{why} does not end; threads: {self.hub.told()}")

    def wait(self, seconds: float) -> None:
        """Advance the time by ``seconds``, and run all work of this time."""
        end = self.now + seconds
        while self.turn(end) and self.now < end:
            pass
        self.now = max(self.now, end)

    def complete(self, work: Coroutine[Any, Any, Any], why: str, seconds: float = _PATIENCE_SECONDS) -> Any:
        """Run until a coroutine has ended; return its result. Raises Stuck, and the coroutine's exceptions."""
        task = self.create_task(work)
        self.until(task.done, why, seconds)
        return task.result()

    def cancel(self) -> None:
        """End threads and tasks at their current position."""
        self.hub.kill(self.hub.threads)
        while tasks := [task for task in asyncio.all_tasks(self) if task.cancelling() < _CANCELLED_ENOUGH]:
            for task in tasks:
                task.cancel()
            while self._ready:
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()

    def end(self) -> None:
        self._ready.clear()
        self._scheduled.clear()
        self._default_executor = None
        if self._is_entered:
            self.leave()
        self.close()
