"""Simulated device on host memory. It reports errors that CUDA would report late or never."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from kvkernels.device.device_port import DeviceFacts, Step
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.kvkernels.device import access_order
from tests.kvkernels.device.access_order import AccessOrder, Clock, call_site
from tests.kvkernels.device.device_fault import (
    CaptureViolation,
    DeviceFault,
    DeviceLost,
    FreedInUse,
    HostAddress,
    WrongDevice,
)
from tests.kvkernels.device.simulated_copy import enqueue_copy
from tests.kvkernels.device.simulated_memory import Block, BlockTable
from tests.kvkernels.device.simulated_stream import Schedule, SimulatedEvent, SimulatedStream
from tests.kvkernels.device.virtual_clock import COMPUTE, VirtualClock, costs_of
from tests.kvkernels.doubles.card import H100, Card
from tests.kvkernels.doubles.pinned_range import PinnedRange

_BLOCKS = BlockTable()
_MULTIPROCESSORS = {"V100": 80, "T4": 40, "RTX 3060": 28, "RTX 4060": 24, "A100": 108, "H100": 132}
_MAX_PIECES = 4


@dataclass(frozen=True)
class Use:
    """The bytes ``start`` to ``end`` of a block, which a piece of work reads or writes."""

    block: Block
    start: int
    end: int
    writes: bool
    scattered: bool = False


def use_of(tensor: Tensor, writes: bool) -> Use:
    """Return the use of a tensor's memory, from its first to its last byte."""
    tensor = getattr(tensor, "raw", tensor)
    start = tensor.data_ptr()
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    block = _BLOCKS.find(start, span * tensor.element_size())
    return Use(block, start - block.address, start - block.address + span * tensor.element_size(), writes)


def find_block(address: int) -> Block:
    return _BLOCKS.find(address)


class SimulatedDevice:
    """One simulated card. With ``executes=False``, it keeps the clocks and the checks but moves no bytes.

    The next synchronization, or ``close``, raises the faults of enqueued work.
    """

    def __init__(
        self,
        ordinal: int = 0,
        card: Card = H100,
        schedule: Schedule = Schedule.DELAYED,
        seed: int = 0,
        executes: bool = True,
        costs: Any = None,
        kind: str = "privateuseone",
    ) -> None:
        self.torch = torch.device(kind, ordinal)
        self.card, self.schedule, self.seed = card, schedule, seed
        self.clock, self.order = VirtualClock(costs or costs_of(card)), AccessOrder()
        self.host = access_order.HOST
        self.changed, self.closed = threading.Condition(threading.RLock()), False
        self.faults: list[BaseException] = []
        self.launched: list[str] = []  # names of kernels
        self.used_bytes = 0
        self.wrap: Callable[[Tensor], Tensor] = lambda memory: memory
        self.executes, self._lost = executes, ""
        self.registered: list[tuple[int, int, PinnedRange]] = []
        self._streams: dict[int, SimulatedStream] = {}
        self._numbers = itertools.chain([0], itertools.cycle(range(1, 33)))
        self._default, self._local = self.stream(), threading.local()

    # ---- device interface ----

    @property
    def facts(self) -> DeviceFacts:
        architecture = self.card.architecture.removeprefix("sm_")
        capability = int(architecture[:-1]), int(architecture[-1])
        memory = self.clock.costs.memory_bytes
        return DeviceFacts(self.card.name, capability, _MULTIPROCESSORS[self.card.name], self.card.shared_bytes, memory)

    def free_bytes(self) -> int:
        return self.clock.costs.memory_bytes - self.used_bytes

    def allocate(self, size_bytes: int) -> Tensor:
        return self.wrap(self.allocate_raw(size_bytes))

    def allocate_raw(self, size_bytes: int, host_bytes: int = 0) -> Tensor:
        """Allocate device memory as a CPU tensor, which only this device may access.

        ``host_bytes`` of it do not count as device memory.
        """
        self.check_alive()
        own = size_bytes - host_bytes
        if own > self.free_bytes():
            raise torch.OutOfMemoryError(
                f"{self.torch}: {own} bytes are wanted, and {self.free_bytes()} are free of the {self.card.name}"
            )
        self.used_bytes += own
        block, tensor = _BLOCKS.allocate(size_bytes, False, self.index, call_site(), self._freed, self.executes)
        block.host_bytes = host_bytes
        return tensor

    def extended(self, strips: int, device_bytes: int, host_bytes: int) -> Tensor:
        size = device_bytes + host_bytes
        return self.wrap(self.allocate_raw(strips * size, strips * host_bytes).view(strips, size))

    def pinned(self, size_bytes: int) -> Tensor:
        self.check_call("pinned memory is allocated")
        _, tensor = _BLOCKS.allocate(size_bytes, True, self.index, call_site(), self._freed, self.executes)
        return tensor

    def check_host_access(self, memory: Tensor, write: bool) -> None:
        use = use_of(memory, write)
        if not use.block.pinned:
            raise HostAddress(f"the host accesses memory of {self.torch}, allocated at {use.block.site}")
        self.order.advance(self.host)
        self.order.add(use.block.address, use.start, use.end, write, self.host, f"the host's code at {call_site()}")

    def stream(self) -> SimulatedStream:
        """Return the next of 32 streams, as torch does. The first call returns the default stream."""
        with self.changed:
            number = next(self._numbers)
            return self._streams.setdefault(number, SimulatedStream(self, number))

    @cached_property
    def _side(self) -> SimulatedStream:
        return self.stream()

    def event(self, timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self)

    def current_stream(self) -> SimulatedStream:
        return self.active_streams[-1] if self.active_streams else self._default

    def default_stream(self) -> SimulatedStream:
        return self._default

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def record_graph(self, step: Step) -> Step:
        from kvkernels.device.cuda_graph_recorder import CaptureCheck

        side, before = self._side, self.current_stream()
        side.wait_stream(before)
        with side.active():
            with CaptureCheck(self.facts.capability):
                step()
            side.synchronize()
            with side.captured() as graph:
                out = step()
        before.wait_stream(side)

        @torch.inference_mode()  # a replay writes results of the recorded step, which ran in this mode
        def replay() -> Tensor:
            current = self.current_stream()
            for node in graph:
                node(current)
            return out

        return replay

    def synchronize(self) -> None:
        self.check_call("the host waits for the device", waits=True)
        for stream in list(self._streams.values()):
            self.clock.host_waits(self.clock.time_of(stream.name))
            self.host_waits(stream, stream.num_enqueued, self.order.clock_of(stream.name), counted=False)

    # ---- not part of the device interface ----

    @property
    def index(self) -> int:
        return self.torch.index or 0

    @property
    def num_pending(self) -> int:
        """Number of pieces of enqueued work that are not done."""
        return sum(stream.num_pending for stream in self._streams.values())

    @property
    def active_streams(self) -> list[SimulatedStream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        found: list[SimulatedStream] = self._local.streams
        return found

    def stream_of(self, handle: int) -> SimulatedStream:
        return self._streams[handle]

    def register(self, memory: Tensor) -> None:
        """Page-lock existing host memory. The device keeps the pages that the memory has now."""
        pinned = PinnedRange(memory.data_ptr(), memory.nbytes)
        self.registered.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes, pinned))

    def close(self) -> None:
        """End the threads. Raises the faults of enqueued work."""
        with contextlib.suppress(DeviceLost):
            for stream in list(self._streams.values()):
                stream.finish(stream.num_enqueued)
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for _, _, pinned in self.registered:
            pinned.release()
        self._raise_faults()

    use_of = staticmethod(use_of)

    def copy(self, stream: SimulatedStream, target: Tensor, source: Tensor) -> None:
        enqueue_copy(self, stream, target, source)

    def fill(self, stream: SimulatedStream, target: Tensor, byte: int) -> None:
        use = use_of(target, True)
        if use.block.pinned:
            raise HostAddress("a device fills its own memory only")
        view = use.block.view(use.start, use.end)
        seconds = self.clock.kernel_seconds(target.nbytes)
        self.enqueue(stream, f"a fill at {call_site()}", [use], COMPUTE, seconds, lambda _: view.fill(byte))

    def enqueue(
        self,
        stream: SimulatedStream,
        what: str,
        uses: Sequence[Use],
        engine: str,
        seconds: float,
        work: Callable[[random.Random], object],
    ) -> None:
        """Check all memory that a piece of work uses, then enqueue the work."""
        self._check_uses(stream, what, uses)
        if stream.recording is not None:
            stream.recording.append(lambda on: self._add(on, f"{what}, replayed", uses, engine, seconds, work))
            return
        self._add(stream, what, uses, engine, seconds, work)

    def _check_uses(self, stream: SimulatedStream, what: str, uses: Sequence[Use]) -> None:
        self.check_alive()
        if stream.device is not self:
            raise WrongDevice(f"{what}: {stream.name} is not of {self.torch}")
        stream.check_thread(what)
        for use in uses:
            if not use.block.pinned and use.block.ordinal != self.index:
                raise WrongDevice(f"{what}: memory of device {use.block.ordinal} is used on {stream.name}")

    def _order(self, stream: SimulatedStream, what: str, uses: Sequence[Use], same: bool = False) -> None:
        """Check the uses of a stream's next piece of work, or additional uses of the ``same`` piece."""
        with self.changed:
            if not same:
                self.order.join(stream.name, self.order.clock_of(self.host))
                self.order.advance(stream.name)
            for use in uses:
                self.order.add(use.block.address, use.start, use.end, use.writes, stream.name, what, use.scattered)
                if use.writes:
                    use.block.mark_written(use.start, use.end)

    def _add(
        self,
        stream: SimulatedStream,
        what: str,
        uses: Sequence[Use],
        engine: str,
        seconds: float,
        work: Callable[[random.Random], object],
    ) -> None:
        with self.changed:
            self._order(stream, what, uses)
            for use in uses:
                use.block.pending.append((use.start, use.end, use.writes))
            self.clock.enqueue(stream.name, engine, seconds)

        def done() -> None:
            for use in uses:
                use.block.pending.remove((use.start, use.end, use.writes))

        stream.enqueue(work if self.executes else _nothing, done)

    def compute(
        self,
        what: str,
        uses: Sequence[Use],
        flops: float,
        run: Callable[[], Any],
        placed: Callable[[Any], Any],
        made: Callable[[], Sequence[Use]],
        again: Callable[[], None],
    ) -> Any:
        """Finish the work before a kernel on the current stream, then run the kernel now; return its placed results.

        ``placed`` copies each tensor of ``run``'s result to device memory. ``made`` returns the uses of these tensors.
        ``again`` runs a recorded kernel once more into the same results.
        """
        stream = self.current_stream()
        self._check_uses(stream, what, uses)
        if stream.recording is None:
            self._order(stream, what, uses)
            if self.executes:
                stream.drain()
        found = tree_map(placed, run())
        everything = [*uses, *made()]
        if stream.recording is None:
            self._order(stream, what, made(), same=True)
            self.clock.enqueue(stream.name, COMPUTE, self._kernel_seconds(everything, flops))
            return found

        def replay(on: SimulatedStream) -> None:
            self._order(on, f"{what}, replayed", everything)
            on.drain()
            again()
            self.clock.enqueue(on.name, COMPUTE, self._kernel_seconds(everything, flops))

        stream.recording.append(replay)
        return found

    def _kernel_seconds(self, uses: Sequence[Use], flops: float) -> float:
        return self.clock.kernel_seconds(float(sum(use.end - use.start for use in uses)), flops)

    def check_read(self, what: str, uses: Sequence[Use]) -> None:
        """Check that the host may read device memory by a synchronous copy."""
        self.order.advance(self.host)
        for use in uses:
            self.order.add(use.block.address, use.start, use.end, False, self.host, what)

    def is_pinned(self, memory: Tensor) -> bool:
        try:
            return bool(memory.numel()) and find_block(memory.data_ptr()).pinned
        except DeviceFault:
            return False

    def check_alive(self) -> None:
        """Raise DeviceLost if an earlier call failed."""
        if self._lost:
            raise DeviceLost(f"{self.torch} computes no more: {self._lost}")

    def check_call(self, what: str, waits: bool = False) -> None:
        """Raise CaptureViolation if this thread captures a stream, and DeviceLost if the device has failed."""
        self.check_alive()
        if any(stream.recording is not None for stream in self.active_streams):
            raise CaptureViolation(f"{what} in a capture, at {call_site()}")

    def kill(self, why: str) -> None:
        """Make every later call fail, as after an illegal access."""
        self._lost = why

    def host_waits(self, stream: SimulatedStream, number: int, clock: Clock, counted: bool = True) -> None:
        if counted:
            self.clock.host_waits(self.clock.time_of(stream.name))
        stream.finish(number)
        self.order.join(self.host, clock)
        self._raise_faults()

    def _raise_faults(self) -> None:
        if self.faults:
            faults, self.faults = self.faults, []
            raise faults[0]

    def _freed(self, block: Block) -> None:
        with self.changed:
            if not block.pinned:
                self.used_bytes -= block.size_bytes - block.host_bytes
            actor = self.host if block.pinned else self.current_stream().name
            if not block.pinned:  # the host frees the memory, ordered by the current stream
                self.order.join(actor, self.order.clock_of(self.host))
            still = self.order.last_unordered(block.address, actor)
            self.order.forget(block.address)
            if still is not None and not self.closed:
                self.faults.append(FreedInUse(f"memory allocated at {block.site} is freed, and {still}"))


def _nothing(_: random.Random) -> None:
    return
