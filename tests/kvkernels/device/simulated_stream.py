"""Simulated streams and events: queues of work on threads, with random delays from a seed."""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkernels.device.device_port import Event, Stream
from torch import Tensor

from tests.kvkernels.device.access_order import Clock
from tests.kvkernels.device.device_fault import CaptureViolation, UnrecordedEvent, WrongDevice

if TYPE_CHECKING:
    from tests.kvkernels.device.simulated_device import SimulatedDevice

_MAX_DELAY_SECONDS = 0.002
_POLLS_UNTIL_DONE = 3  # late work runs after this number of queries of an event


class Schedule(enum.Enum):
    """Rules by which a stream delays enqueued work."""

    EAGER = "at once"
    DELAYED = "after random times"
    LATE = "when somebody waits for it"


@dataclass
class _Item:
    """A piece of work, or a wait for a number of pieces of another stream."""

    work: Callable[[random.Random], None] | None
    need: tuple[SimulatedStream, int] | None
    done: Callable[[], None]


class SimulatedStream:
    """A stream of a simulated device, with its own thread."""

    def __init__(self, device: SimulatedDevice, number: int) -> None:
        self.device, self.handle = device, number
        self.name = f"stream {number} of {device.torch}"
        self.recording: list[Callable[[SimulatedStream], None]] | None = None
        self._recorder = 0  # number of the thread that captures
        self._items: deque[_Item] = deque()
        self.num_enqueued, self._num_done, self._num_demanded = 0, 0, 0
        self._thread: threading.Thread | None = None

    # ---- port ----

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        device = self.device
        device.check_call("a stream waits for an event")
        at = event.checked()
        device.order.join(self.name, at.clock)
        device.clock.wait(self.name, at.time)
        self._add(_Item(None, (at.stream, at.number), lambda: None))

    def wait_stream(self, other: Stream) -> None:
        event = self.device.event()
        event.record(other)
        self.wait(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.device.copy(self, target, source)

    def fill(self, target: Tensor, byte: int) -> None:
        self.device.fill(self, target, byte)

    @contextmanager
    def active(self) -> Iterator[None]:
        stack = self.device.active_streams
        stack.append(self)
        try:
            yield
        finally:
            stack.pop()

    def synchronize(self) -> None:
        self.device.check_call("the host waits for a stream", waits=True)
        self.device.host_waits(self, self.num_enqueued, self.device.order.clock_of(self.name))

    # ---- capture ----

    @contextmanager
    def captured(self) -> Iterator[list[Callable[[SimulatedStream], None]]]:
        """Record this thread's work instead of running it."""
        self.recording, self._recorder = [], threading.get_ident()
        try:
            yield self.recording
        finally:
            self.recording = None

    def check_thread(self, what: str) -> None:
        """Raise CaptureViolation if another thread captures this stream."""
        if self.recording is not None and self._recorder != threading.get_ident():
            raise CaptureViolation(f"{what}: another thread captures {self.name}")

    # ---- queue ----

    @property
    def num_pending(self) -> int:
        return self.num_enqueued - self._num_done

    def enqueue(self, work: Callable[[random.Random], None], done: Callable[[], None]) -> None:
        self._add(_Item(work, None, done))

    def _add(self, item: _Item) -> None:
        with self.device.changed:
            self._items.append(item)
            self.num_enqueued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self.device.changed.notify_all()

    def is_done(self, number: int) -> bool:
        with self.device.changed:
            return self._num_done >= number

    def demand(self, number: int) -> None:
        """Let the first ``number`` pieces of work run now."""
        with self.device.changed:
            self._num_demanded = max(self._num_demanded, number)
            self.device.changed.notify_all()

    def finish(self, number: int) -> None:
        """Block until the first ``number`` pieces of work are done."""
        self.demand(number)
        with self.device.changed:
            if not self.device.changed.wait_for(lambda: self._num_done >= number or self.device.closed, 60):
                raise TimeoutError(f"{self.name} does not finish its work")

    def drain(self) -> None:
        """Block until all work is done."""
        self.finish(self.num_enqueued)

    def _run(self) -> None:
        device, number = self.device, 0
        while True:
            number += 1
            with device.changed:
                device.changed.wait_for(lambda: device.closed or (bool(self._items) and self._may_run(number)))  # noqa: B023
                if device.closed:
                    return
                item = self._items.popleft()
            if item.need is not None:
                stream, wanted = item.need
                stream.finish(wanted)
            if item.work is not None:
                dice = random.Random(f"{device.seed} {self.handle} {number}")
                if device.schedule is Schedule.DELAYED:
                    time.sleep(dice.uniform(0, _MAX_DELAY_SECONDS))
                try:
                    item.work(dice)
                except BaseException as error:
                    device.faults.append(error)
            with device.changed:
                item.done()
                self._num_done = number
                device.changed.notify_all()

    def _may_run(self, number: int) -> bool:
        return self.device.schedule is not Schedule.LATE or number <= self._num_demanded


@dataclass(frozen=True)
class _Point:
    stream: SimulatedStream
    number: int
    clock: Clock
    time: float


class SimulatedEvent:
    """Event of a simulated device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._point: _Point | None = None
        self._num_polls = 0

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        if stream.device is not self._device:
            raise WrongDevice(f"an event of {self._device.torch} is recorded on {stream.name}")
        if stream.recording is not None:
            raise CaptureViolation("an event is recorded in a capture, and would be waited for outside of it")
        device = self._device
        device.check_alive()
        # Include the host's clock: an event comes after all work that the host did before it recorded the event.
        device.order.join(stream.name, device.order.clock_of(device.host))
        at = device.clock.time_of(stream.name)
        self._point = _Point(stream, stream.num_enqueued, device.order.clock_of(stream.name), at)
        self._num_polls = 0

    def query(self) -> bool:
        self._device.check_call("the host asks for an event", waits=True)
        at = self.checked()
        self._num_polls += 1
        if self._num_polls >= _POLLS_UNTIL_DONE:
            at.stream.demand(at.number)
        done = at.stream.is_done(at.number) if self._device.executes else at.time <= self._device.clock.host
        if done:
            self._device.order.join(self._device.host, at.clock)
        return done

    def synchronize(self) -> None:
        self._device.check_call("the host waits for an event", waits=True)
        at = self.checked()
        self._device.clock.host_waits(at.time)
        self._device.host_waits(at.stream, at.number, at.clock, counted=False)

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimulatedEvent)
        return (self.checked().time - earlier.checked().time) * 1e3

    def checked(self) -> _Point:
        if self._point is None:
            raise UnrecordedEvent("the event was not recorded, so waiting for it would wait for nothing")
        return self._point
