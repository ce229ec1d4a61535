"""Defects that a real device punishes rarely or silently; the simulated one reports each by its name."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kvkernels.cuda.cuda_library import KernelLaunchError
from torch import Tensor

from tests.kvkernels.device import device_fault as fault
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.doubles.card import RTX_4060, T4

SIZE = 1 << 16


class Params(ctypes.Structure):
    _fields_ = (("payloads", ctypes.c_void_p),)


class NoKernels:
    """Kernels without effect. They suffice, because the simulated device checks a launch before the kernel runs."""

    def launch(self, *_: object) -> None:
        return

    def has(self, *_: object) -> bool:
        return True


class Setup:
    """Two devices, and the objects that most defects use."""

    def __init__(self, schedule: Schedule) -> None:
        self.device, self.other = (SimulatedDevice(i, schedule=schedule) for i in range(2))
        for device in (self.device, self.other):
            add_simulated_device(device)
        self.kernels = SimulatedKernels(self.device, NoKernels())
        self.a, self.b = self.device.stream(), self.device.stream()
        self.memory, self.pinned = self.device.allocate(SIZE), self.device.pinned(SIZE)

    def launch(self, address: int, stream: int = 0, threads: int = 32, shared: int = 0, grid: Any = (1, 1, 1)) -> None:
        self.kernels.launch("pack16_f16", grid, threads, shared, Params(address), stream)

    def close(self) -> None:
        for device in (self.device, self.other):
            device.close()


@pytest.fixture(params=Schedule, ids=lambda schedule: schedule.value)
def s(request: pytest.FixtureRequest) -> Iterator[Setup]:
    made = Setup(request.param)
    yield made
    for device in (made.device, made.other):
        device.faults.clear()
        device._lost = ""
        device.close()


def missing_event_wait(s: Setup) -> None:
    s.a.copy(s.memory, s.pinned)
    s.b.copy(s.device.pinned(SIZE), s.memory)


def slot_reused_before_free(s: Setup) -> None:
    s.a.copy(s.memory, s.pinned)
    ready = s.device.event()
    ready.record(s.a)
    s.b.wait(ready)
    with s.b.active():
        s.memory.view(torch.float32).sum()
    s.a.copy(s.memory, s.pinned)


def event_recorded_before_the_copy(s: Setup) -> None:
    ready = s.device.event()
    ready.record(s.a)
    s.a.copy(s.memory, s.pinned)
    s.b.wait(ready)
    s.b.copy(s.device.pinned(SIZE), s.memory)


def event_of_the_wrong_stream(s: Setup) -> None:
    ready = s.device.event()
    s.a.copy(s.memory, s.pinned)
    ready.record(s.b)
    s.b.wait(ready)
    with s.b.active():
        s.memory.add_(1)


def read_after_event_of_an_earlier_round(s: Setup) -> None:
    ready = s.device.event()
    s.a.copy(s.memory, s.pinned)
    ready.record(s.a)
    s.a.copy(s.memory, s.pinned)
    s.b.wait(ready)
    s.b.fill(s.memory, 1)


def pinned_memory_written_in_flight(s: Setup) -> None:
    s.a.copy(s.memory, s.pinned)
    s.device.check_host_access(s.pinned, write=True)


def pinned_memory_read_before_it_arrives(s: Setup) -> None:
    s.a.fill(s.memory, 1)
    s.a.copy(s.pinned, s.memory)
    s.device.check_host_access(s.pinned, write=False)


def pinned_memory_read_after_an_event_before_it(s: Setup) -> None:
    s.a.fill(s.memory, 1)
    filled = s.device.event()
    filled.record(s.a)
    s.a.copy(s.pinned, s.memory)
    filled.synchronize()
    s.device.check_host_access(s.pinned, write=False)


def announced_before_copied(s: Setup) -> None:
    """The device copies memory out before any work has written it."""
    s.b.copy(s.pinned, s.memory)


def two_streams_write_one_slot(s: Setup) -> None:
    s.a.fill(s.memory, 1)
    s.b.fill(s.memory[SIZE // 2 :], 2)


def torch_operation_on_the_wrong_stream(s: Setup) -> None:
    s.a.fill(s.memory, 1)
    s.memory.add_(1)


def stream_of_another_device(s: Setup) -> None:
    s.other.stream().copy(s.memory, s.pinned)


def memory_of_another_device(s: Setup) -> None:
    s.a.fill(s.other.allocate(SIZE), 1)


def event_on_another_devices_stream(s: Setup) -> None:
    s.device.event().record(s.other.stream())


def tensors_of_two_devices(s: Setup) -> None:
    torch.add(s.memory, s.other.allocate(SIZE))


def kernel_on_memory_of_another_device(s: Setup) -> None:
    memory = s.other.allocate(SIZE)
    s.launch(memory.data_ptr())


def host_waits_during_capture(s: Setup) -> None:
    s.device.record_graph(lambda: s.memory.add_(1 if s.device.current_stream().recording is None else _waited(s)))


def _waited(s: Setup) -> int:
    s.device.synchronize()
    return 1


def host_reads_during_capture(s: Setup) -> None:
    s.memory.zero_()

    def step() -> Tensor:
        if s.device.current_stream().recording is None:
            return s.memory
        return s.memory.add_(int(s.memory[0]))

    s.device.record_graph(step)


def pinned_memory_allocated_during_capture(s: Setup) -> None:
    def step() -> Tensor:
        s.device.pinned(SIZE)
        return s.memory

    side = s.device.stream()
    with side.captured(), side.active():
        step()


def event_asked_for_during_capture(s: Setup) -> None:
    done = s.device.event()
    done.record(s.a)
    side = s.device.stream()
    with side.captured(), side.active():
        done.query()


def work_of_another_thread_during_capture(s: Setup) -> None:
    streams = [s.device.stream() for _ in range(32)]  # the next stream is the first one again
    with ThreadPoolExecutor(1) as thread, streams[0].captured():
        thread.submit(s.device.stream().fill, s.memory, 1).result()


def waited_for_an_event_that_was_not_recorded(s: Setup) -> None:
    s.b.wait(s.device.event())


def copy_from_pageable_memory(s: Setup) -> None:
    s.a.copy(s.memory, torch.zeros(SIZE, dtype=torch.uint8))


def kernel_given_a_host_address(s: Setup) -> None:
    s.launch(np.zeros(SIZE, np.uint8).ctypes.data)


def kernel_given_pinned_memory(s: Setup) -> None:
    s.launch(s.pinned.data_ptr())


def kernel_given_freed_memory(s: Setup) -> None:
    memory = s.device.allocate(SIZE)
    address = memory.data_ptr()
    del memory
    s.launch(address)


def call_after_an_illegal_access(s: Setup) -> None:
    with pytest.raises(fault.HostAddress):
        s.launch(s.pinned.data_ptr())
    s.a.fill(s.memory, 1)


def device_memory_freed_in_use(s: Setup) -> None:
    memory = s.device.allocate(SIZE)
    s.a.copy(memory, s.pinned)
    del memory
    s.device.synchronize()


def pinned_memory_freed_in_use(s: Setup) -> None:
    pinned = s.device.pinned(SIZE)
    s.a.copy(s.memory, pinned)
    del pinned
    s.device.synchronize()


def graph_replayed_after_its_memory_is_written(s: Setup) -> None:
    s.memory.zero_()
    replay = s.device.record_graph(lambda: s.memory.add_(1))
    s.a.wait_stream(s.device.current_stream())
    s.a.fill(s.memory, 3)
    replay()


def device_memory_read_by_the_host(s: Setup) -> None:
    s.device.check_host_access(s.memory, write=False)


def copy_beyond_the_end(s: Setup) -> None:
    raw = s.memory.raw  # type: ignore[attr-defined]
    beyond = torch.frombuffer((ctypes.c_uint8 * SIZE).from_address(raw.data_ptr() + 64), dtype=torch.uint8)
    s.a.copy(beyond, s.pinned)


DEFECTS: dict[Callable[[Setup], None], type[BaseException]] = {
    missing_event_wait: fault.UnorderedAccess,
    slot_reused_before_free: fault.UnorderedAccess,
    event_recorded_before_the_copy: fault.UnorderedAccess,
    event_of_the_wrong_stream: fault.UnorderedAccess,
    read_after_event_of_an_earlier_round: fault.UnorderedAccess,
    pinned_memory_written_in_flight: fault.UnorderedAccess,
    pinned_memory_read_before_it_arrives: fault.UnorderedAccess,
    pinned_memory_read_after_an_event_before_it: fault.UnorderedAccess,
    announced_before_copied: fault.UninitializedRead,
    two_streams_write_one_slot: fault.UnorderedAccess,
    torch_operation_on_the_wrong_stream: fault.UnorderedAccess,
    stream_of_another_device: fault.WrongDevice,
    memory_of_another_device: fault.WrongDevice,
    event_on_another_devices_stream: fault.WrongDevice,
    tensors_of_two_devices: fault.WrongDevice,
    kernel_on_memory_of_another_device: fault.WrongDevice,
    host_waits_during_capture: fault.CaptureViolation,
    host_reads_during_capture: fault.CaptureViolation,
    pinned_memory_allocated_during_capture: fault.CaptureViolation,
    event_asked_for_during_capture: fault.CaptureViolation,
    work_of_another_thread_during_capture: fault.CaptureViolation,
    waited_for_an_event_that_was_not_recorded: fault.UnrecordedEvent,
    copy_from_pageable_memory: fault.PageableMemory,
    kernel_given_a_host_address: fault.HostAddress,
    kernel_given_pinned_memory: fault.HostAddress,
    kernel_given_freed_memory: fault.UseAfterFree,
    call_after_an_illegal_access: fault.DeviceLost,
    device_memory_freed_in_use: fault.FreedInUse,
    pinned_memory_freed_in_use: fault.FreedInUse,
    graph_replayed_after_its_memory_is_written: fault.UnorderedAccess,
    device_memory_read_by_the_host: fault.HostAddress,
    copy_beyond_the_end: fault.OutOfBounds,
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_reported_by_its_name(s: Setup, defect: Callable[[Setup], None]) -> None:
    with pytest.raises(DEFECTS[defect]) as found:
        defect(s)
    assert type(found.value) is DEFECTS[defect]


def test_an_unordered_access_names_both_places(s: Setup) -> None:
    with pytest.raises(fault.UnorderedAccess) as found:
        missing_event_wait(s)
    assert str(found.value).count("test_planted_defects.py:") == 2, found.value
    assert "missing_event_wait" in str(found.value)


def test_pinned_memory_that_changes_undeclared_is_reported_by_the_next_wait() -> None:
    device = SimulatedDevice(schedule=Schedule.LATE)
    stream, pinned, memory = device.stream(), device.pinned(SIZE), device.allocate(SIZE)
    stream.copy(memory, pinned)
    pinned.fill_(1)
    with pytest.raises(fault.PinnedChanged):
        stream.synchronize()
    device.close()


def test_pages_that_are_replaced_under_a_registration_are_reported() -> None:
    pages = mmap.mmap(-1, SIZE)
    shown = torch.frombuffer(pages, dtype=torch.uint8)
    shown.fill_(1)
    device = SimulatedDevice()
    device.register(shown)
    stream, memory = device.stream(), device.allocate(SIZE)
    stream.fill(memory, 7)
    stream.copy(shown, memory)
    stream.synchronize()
    assert (shown == 7).all()
    pages.madvise(mmap.MADV_REMOVE)
    stream.copy(shown, memory)
    with pytest.raises(fault.PagesReplaced):
        stream.synchronize()
    device.close()


def test_a_launch_beyond_a_cards_limits_is_refused(s: Setup) -> None:
    s.device.card = T4
    for limits in ({"shared": 67_584}, {"threads": 2048}, {"grid": (1, 70_000, 1)}):
        with pytest.raises(KernelLaunchError, match="T4"):
            s.launch(s.memory.data_ptr(), **limits)


def test_memory_beyond_a_cards_is_refused() -> None:
    device = SimulatedDevice(card=RTX_4060, executes=False)
    kept = device.allocate(7 << 30)
    with pytest.raises(torch.OutOfMemoryError, match="RTX 4060"):
        device.allocate(2 << 30)
    del kept
    device.allocate(2 << 30)
    device.close()
