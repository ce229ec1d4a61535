"""CUDA device: the device port on torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkernels.device.cuda_graph_recorder import CudaGraphRecorder
from kvkernels.device.device_port import DeviceFacts, Event, Step, Stream, check_copy
from kvkernels.device.managed_memory import ManagedMemory


class CudaEvent:
    """Event of a CUDA device."""

    def __init__(self, event: Any) -> None:
        self.event = event
        self._recorded = False

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self.event.record(stream.stream)
        self._recorded = True

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.check_recorded()
        self.event.synchronize()

    def milliseconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event))

    def check_recorded(self) -> None:
        """Raise RuntimeError for an event that was not recorded; CUDA itself would not wait."""
        if not self._recorded:
            raise RuntimeError("the event was not recorded, so waiting for it would wait for nothing")


class CudaStream:
    """Stream of a CUDA device."""

    def __init__(self, stream: Any) -> None:
        self._cuda: Any = torch.cuda
        self.stream = stream

    @property
    def handle(self) -> int:
        return int(self.stream.cuda_stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.check_recorded()
        self.stream.wait_event(event.event)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, CudaStream)
        self.stream.wait_stream(other.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        check_copy(target, source)
        if not all(x.is_cuda or x.is_pinned() for x in (target, source)):
            raise ValueError("a copy of memory that is neither pinned nor a device's would block the host")
        with self.active():
            target.copy_(source, non_blocking=True)

    def fill(self, target: Tensor, byte: int) -> None:
        with self.active():
            target.view(torch.uint8).fill_(byte)

    def active(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._cuda.stream(self.stream)
        return context

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaDevice:
    """A CUDA device, by the ordinal that torch gives it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self.torch = torch.device("cuda", self._cuda.current_device() if device.index is None else device.index)
        self._recorder = CudaGraphRecorder(self.torch)

    @cached_property
    def facts(self) -> DeviceFacts:
        found = self._cuda.get_device_properties(self.torch)
        return DeviceFacts(
            str(found.name),
            (int(found.major), int(found.minor)),
            int(found.multi_processor_count),
            int(getattr(found, "shared_memory_per_block_optin", 0)),
            int(found.total_memory),
        )

    def free_bytes(self) -> int:
        unused = self._cuda.memory_reserved(self.torch) - self._cuda.memory_allocated(self.torch)
        return int(self._cuda.mem_get_info(self.torch)[0]) + int(unused)

    def allocate(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch)

    def extended(self, strips: int, device_bytes: int, host_bytes: int) -> Tensor:
        size, wanted = device_bytes + host_bytes, strips * device_bytes
        with self.guard():
            # Managed memory may exceed a device without an error, and cannot use what torch's allocator keeps unused.
            self._cuda.empty_cache()
            free = int(self._cuda.mem_get_info(self.torch)[0])
            if wanted > free:
                raise torch.OutOfMemoryError(f"{self.torch}: {wanted} bytes are wanted, and {free} are free")
            memory = ManagedMemory(self.torch.index, strips * size)
            for at in range(0, strips * size, size):
                memory.keep_on_device(at, device_bytes)
                memory.keep_on_host(at + device_bytes, host_bytes)
            self.synchronize()  # the device's parts are no longer free memory
        return torch.as_tensor(memory, device=self.torch).view(strips, size)

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def check_host_access(self, memory: Tensor, write: bool) -> None:
        return

    def stream(self) -> CudaStream:
        return CudaStream(self._cuda.Stream(self.torch))

    def event(self, timed: bool = False) -> CudaEvent:
        return CudaEvent(self._cuda.Event(enable_timing=timed))

    def current_stream(self) -> CudaStream:
        return CudaStream(self._cuda.current_stream(self.torch))

    def default_stream(self) -> CudaStream:
        return CudaStream(self._cuda.default_stream(self.torch))

    def guard(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._cuda.device(self.torch)
        return context

    def record_graph(self, step: Step) -> Step:
        return self._recorder.record(step)

    def synchronize(self) -> None:
        self._cuda.synchronize(self.torch)
