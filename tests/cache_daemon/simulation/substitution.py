"""Substitutes for the clocks, threads and random numbers that the daemon's modules use."""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import ModuleType
from typing import Any

from tests.cache_daemon.simulation.loop import SimulatedLoop
from tests.cache_daemon.simulation.thread import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedExecutor,
    SimulatedLock,
    SimulatedThread,
)

# Packages whose modules get the substitutes: the daemon, and the doubles of its disk and remote backend.
_PACKAGES = ("cache_daemon", "tests.cache_daemon.doubles")
# The value of ``time.time`` when the loop's clock is 0.
UNIX_SECONDS = 1_000_000.0


class _Time:
    """Substitute of the module ``time``."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.monotonic = self.perf_counter = self.process_time = self.thread_time = loop.read_clock

    def time(self) -> float:
        return UNIX_SECONDS + self._loop.read_clock()

    def sleep(self, seconds: float) -> None:
        self._loop.hub.wait(lambda: False, seconds)


class _Threading:
    """Substitute of the module ``threading``."""

    def __init__(self, loop: SimulatedLoop) -> None:
        hub = loop.hub
        self.Lock: Callable[[], Any] = lambda: SimulatedLock(hub)
        self.RLock = self.Lock
        self.Condition: Callable[[], Any] = lambda: SimulatedCondition(hub)
        self.Event: Callable[[], Any] = lambda: SimulatedEvent(hub)

        def thread(
            target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "thread", daemon: bool = False
        ) -> SimulatedThread:
            return SimulatedThread(hub, target, args, name)

        self.Thread = thread


class _Secrets:
    """Substitute of the module ``secrets``, with repeatable numbers."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def token_bytes(self, count: int = 32) -> bytes:
        return self._random.randbytes(count)

    def token_hex(self, count: int = 32) -> str:
        return self.token_bytes(count).hex()

    def randbits(self, count: int) -> int:
        return self._random.getrandbits(count)


class _Log:
    """Substitute of a module's logger. Messages go to the log of the run; a logged exception is a defect."""

    def __init__(self, said: Callable[[str], None], failed: Callable[[str], None]) -> None:
        self._said, self._failed = said, failed

    def debug(self, event: str, **values: object) -> None:
        self._said(f"log: {event} {values or ''}")

    info = warning = error = debug

    def exception(self, event: str, **values: object) -> None:
        self._failed(f"{event} {values or ''}: {traceback.format_exc()}")


class Substitution:
    """Replaces ``time``, ``threading``, ``secrets``, ``ThreadPoolExecutor`` and the loggers.

    It replaces them in all loaded modules of the daemon and of its test doubles. So these modules need no parameters
    for clocks, threads and the like.
    """

    def __init__(self, loop: SimulatedLoop, said: Callable[[str], None], failed: Callable[[str], None]) -> None:
        hub = loop.hub
        self._places: list[tuple[ModuleType, str, Any]] = []
        self._log = _Log(said, failed)
        self._stands_in: dict[object, object] = {
            time: _Time(loop),
            threading: _Threading(loop),
            secrets: _Secrets(),
            ThreadPoolExecutor: lambda most, name="pool": SimulatedExecutor(hub, most, name),
        }

    def begin(self) -> None:
        self._places = _places(len(sys.modules))
        for module, name, real in self._places:
            setattr(module, name, self._log if name == "log" else self._stands_in[real])

    def end(self) -> None:
        for module, name, real in self._places:
            setattr(module, name, real)


@lru_cache(maxsize=1)
def _places(_: int) -> list[tuple[ModuleType, str, Any]]:
    """Return the module variables to replace. The cache is invalid as soon as more modules are loaded."""
    return [
        (module, name, value)
        for path, module in sorted(sys.modules.items())
        if any(path == package or path.startswith(f"{package}.") for package in _PACKAGES)
        for name, value in vars(module).items()
        if name == "log" or any(value is real for real in (time, threading, secrets, ThreadPoolExecutor))
    ]
