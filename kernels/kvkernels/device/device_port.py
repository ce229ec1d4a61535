"""Interface of a device: memory, streams, events, graphs, facts.

Work on a stream runs in order; streams and the host run concurrently, ordered only by events and synchronization. The
contract suite, ``tests/kvkernels/device/test_device_contract.py``, runs on every implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a card."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # shared memory that a thread block may opt in to; 0: unknown
    memory_bytes: int


class DeviceLacks(RuntimeError):
    """A device or its driver lacks an ability that not every device has; the message names it."""


class Event(Protocol):
    """Point in a stream's work. It may be recorded again; waiting for an event that was not recorded is an error."""

    def record(self, stream: Stream) -> None:
        """Record the event after the work enqueued so far."""
        ...

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is done."""
        ...

    def milliseconds_since(self, earlier: Event) -> float:
        """Return the time between two events that were made ``timed`` and are done."""
        ...


class Stream(Protocol):
    """Queue of a device's work. Work is enqueued by any thread and does not block it."""

    @property
    def handle(self) -> int:
        """Number that a kernel launch takes."""
        ...

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for the event. Does not block the calling thread."""
        ...

    def wait_stream(self, other: Stream) -> None:
        """Make later work of this stream wait for the work that the other stream has enqueued so far."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between contiguous tensors of equal size: device memory, and memory of ``Device.pinned``.

        Until the copy is done, neither tensor may be freed or written, and the target must not be read.
        """
        ...

    def fill(self, target: Tensor, byte: int) -> None:
        """Enqueue setting every byte of contiguous device memory."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which torch's operations of this thread are enqueued here."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work enqueued so far is done."""
        ...


class Device(Protocol):
    """One device. Thread-safe; calls work whatever the thread's current device is."""

    torch: torch.device

    @property
    def facts(self) -> DeviceFacts: ...

    def free_bytes(self) -> int:
        """Return the device memory that can still be allocated."""
        ...

    def allocate(self, size_bytes: int) -> Tensor:
        """Allocate device memory, uint8 ``[size_bytes]``, with any contents, aligned to 256 bytes.

        The memory is freed with its last reference, in the order of the stream that was current at the allocation.
        Before dropping the last reference, the caller must order that stream after all uses on other streams. Raises
        torch.OutOfMemoryError.
        """
        ...

    def extended(self, strips: int, device_bytes: int, host_bytes: int) -> Tensor:
        """Allocate strips that begin in device memory and end in host memory, uint8 ``[strips, bytes of a strip]``.

        The device reads and writes both parts in place, the ``host_bytes`` of a strip over its link. The contents are
        any. Host memory is taken by the first write. Freed like the memory of ``allocate``. Raises DeviceLacks,
        torch.OutOfMemoryError.
        """
        ...

    def pinned(self, size_bytes: int) -> Tensor:
        """Allocate page-locked host memory, uint8 ``[size_bytes]``, that no other process shares or can replace.

        The allocation may take up to the next power of two.
        """
        ...

    def check_host_access(self, memory: Tensor, write: bool) -> None:
        """Declare that the host now reads or writes pinned memory. CUDA does not check it; a simulated device does."""
        ...

    def stream(self) -> Stream:
        """Create a stream."""
        ...

    def event(self, timed: bool = False) -> Event:
        """Create an event."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream on which this thread's operations are enqueued."""
        ...

    def default_stream(self) -> Stream:
        """Return the stream on which operations are enqueued outside of ``Stream.active``."""
        ...

    def guard(self) -> AbstractContextManager[object]:
        """Return a context in which this device is the thread's current one."""
        ...

    def record_graph(self, step: Step) -> Step:
        """Run and record a step; return a function that replays it on the current stream.

        The step must read and write the same memory at every call. Graphs of a device share memory, so only one may be
        replayed at a time. Raises RuntimeError for a step that cannot be recorded, such as one that waits for the
        device.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all work of the device is done. Raises RuntimeError if the device failed."""
        ...


def check_copy(target: Tensor, source: Tensor) -> None:
    """Raise ValueError for a copy that would convert, repeat or gather."""
    equal = target.dtype == source.dtype and target.nbytes == source.nbytes
    if not (equal and target.is_contiguous() and source.is_contiguous()):
        raise ValueError(
            f"a copy of {source.nbytes} bytes of {source.dtype} to {target.nbytes} of {target.dtype}; allowed are "
            "contiguous tensors of equal size and dtype"
        )
