"""Threads of a simulation, which are greenlets that the loop resumes, and their locks, conditions and events."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tests.cache_daemon.simulation.loop import SimulatedLoop

# The daemon's life that owns the current work. The tasks and threads of a daemon end with it.
OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("OWNER", default=None)


def _always() -> bool:
    return True


class SimulatedThread:
    """Substitute of ``threading.Thread``. ``hub`` has all threads of the simulation.

    The loop resumes the thread, which then runs until it waits or pauses.
    """

    def __init__(
        self, hub: Hub, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "thread"
    ) -> None:
        self.hub, self.name, self.owner = hub, name, OWNER.get()
        self._target, self._args = target, args
        self.may_go: Callable[[], bool] = _always
        self.deadline: float | None = None
        self.ended = False
        self.greenlet: greenlet | None = None

    def start(self) -> None:
        self.greenlet = greenlet(self._run, self.hub.main)
        self.greenlet.gr_context = contextvars.copy_context()
        self.hub.threads.append(self)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        except GreenletExit:
            pass
        except BaseException as error:
            self.hub.loop.errors.append(f"the thread {self.name} ended: {type(error).__name__}: {error}")
        finally:
            self.ended = True
            if self in self.hub.threads:
                self.hub.threads.remove(self)

    def join(self, timeout: float | None = None) -> None:
        self.hub.wait(lambda: self.ended, timeout)

    def is_alive(self) -> bool:
        return self.greenlet is not None and not self.ended


class Hub:
    """All threads of one simulation. ``loop`` resumes them from its own greenlet."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.main = loop, getcurrent()
        self.threads: list[SimulatedThread] = []
        self.current: SimulatedThread | None = None

    def ready(self) -> list[SimulatedThread]:
        now = self.loop.now
        return [t for t in self.threads if (t.deadline is not None and t.deadline <= now) or t.may_go()]

    def next_deadline(self) -> float | None:
        return min((t.deadline for t in self.threads if t.deadline is not None), default=None)

    def resume(self, thread: SimulatedThread) -> None:
        """Run a thread up to its next pause."""
        assert self.current is None, "a thread resumes another one"
        assert thread.greenlet is not None
        self.current, thread.may_go, thread.deadline = thread, _always, None
        try:
            thread.greenlet.switch()
        finally:
            self.current = None

    def pause(self) -> None:
        """In a thread, let other work run. On the loop, do nothing."""
        if self.current is not None:
            self.main.switch()

    def wait(self, may_go: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds; return False after ``timeout`` virtual seconds."""
        thread = self.current
        if thread is None:  # the loop itself waits, which can only be for a thread
            assert timeout is None, "the loop waits with a timeout"
            while not may_go():
                others = self.ready()
                assert others, "the loop waits for ever"
                self.resume(others[0])
            return True
        if may_go():
            return True
        thread.may_go = may_go
        thread.deadline = None if timeout is None else self.loop.now + timeout
        self.main.switch()
        return may_go()

    def kill(self, threads: list[SimulatedThread]) -> None:
        """End threads at their current position."""
        for thread in list(threads):
            if thread.greenlet is not None and not thread.ended:
                self.current = thread
                try:
                    thread.greenlet.throw(GreenletExit)
                finally:
                    self.current = None
                    thread.ended = True
                    if thread in self.threads:
                        self.threads.remove(thread)

    def told(self) -> str:
        return ", ".join(t.name for t in self.threads) or "none"


class SimulatedLock:
    """Substitute of ``threading.RLock``, and of a ``threading.Lock`` that no thread takes twice."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._holder: object = None
        self._depth = 0

    def acquire(self) -> bool:
        me: object = self._hub.current or self._hub
        if self._holder is not me:
            if self._holder is not None:
                self._hub.wait(lambda: self._holder is None)
            self._holder = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedCondition(SimulatedLock):
    """Substitute of ``threading.Condition``."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._waiting: deque[list[bool]] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        ticket = [False]
        self._waiting.append(ticket)
        depth, self._depth = self._depth, 1
        self.release()
        told = self._hub.wait(lambda: ticket[0], timeout)
        if not told:
            self._waiting.remove(ticket)
        self.acquire()
        self._depth = depth
        return told

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedEvent:
    """Substitute of ``threading.Event``."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._is_set = hub, False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self._hub.wait(lambda: self._is_set, timeout)


class SimulatedExecutor(futures.Executor):
    """Substitute of ``ThreadPoolExecutor``. Each job is a thread; at most ``max_workers`` run at a time."""

    def __init__(self, hub: Hub, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._hub, self._most, self._name = hub, max_workers, thread_name_prefix
        self._waiting: deque[tuple[futures.Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: futures.Future[Any] = futures.Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._begin()
        return future

    def _begin(self) -> None:
        if self._running < self._most:
            self._running += 1
            SimulatedThread(self._hub, self._work, (), self._name).start()

    def _work(self) -> None:
        try:
            while self._waiting:
                future, work = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = work()
                except GreenletExit:
                    raise
                except BaseException as error:
                    self._hub.pause()
                    future.set_exception(error)
                else:
                    self._hub.pause()
                    future.set_result(result)
        finally:
            self._running -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            while self._waiting:
                self._waiting.popleft()[0].cancel()
        if wait:
            self._hub.wait(lambda: not (self._running or self._waiting))
