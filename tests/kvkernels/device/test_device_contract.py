"""Contract of a device, for every implementation of the port."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from kvkernels.device.device_port import Device
from torch import Tensor

from tests.kvkernels.device import contract_devices

simulated, device = contract_devices.simulated, contract_devices.device  # fixtures
SIZE = 3 << 20


def numbers(device: Device, seed: int = 0, size: int = SIZE) -> Tensor:
    """Return pinned memory with random bytes."""
    memory = device.pinned(size)
    device.check_host_access(memory, write=True)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return memory


def read(device: Device, memory: Tensor) -> Tensor:
    """Return the bytes of pinned memory."""
    device.check_host_access(memory, write=False)
    return memory.clone()


def test_bytes_come_back_from_the_device(device: Device) -> None:
    stream, source, target = device.stream(), numbers(device), device.pinned(SIZE)
    memory = device.allocate(SIZE)
    stream.copy(memory, source)
    stream.copy(target, memory)
    stream.synchronize()
    assert torch.equal(read(device, target), source)


def test_parts_of_memory_are_copied_where_they_belong(device: Device) -> None:
    stream, source, target = device.stream(), numbers(device), device.pinned(SIZE)
    memory = device.allocate(SIZE)
    stream.fill(memory, 7)
    stream.copy(memory[1000:5000], source[:4000])
    stream.copy(target, memory)
    stream.synchronize()
    found = read(device, target)
    assert torch.equal(found[1000:5000], source[:4000])
    assert (found[:1000] == 7).all()
    assert (found[5000:] == 7).all()


def test_strips_of_device_and_host_memory_are_one_tensor(device: Device) -> None:
    strips, own, beyond = 3, 64 << 10, 128 << 10
    stream, source, target = device.current_stream(), numbers(device), device.pinned(SIZE)
    memory = device.extended(strips, own, beyond)
    assert (memory.shape, memory.dtype) == ((strips, own + beyond), torch.uint8)
    stream.fill(memory, 0)
    for strip in range(strips):
        stream.copy(memory[strip][own - 100 : own + 200], source[strip * 300 : (strip + 1) * 300])
    stream.copy(target[: memory.nbytes], memory.flatten())
    stream.synchronize()
    found = read(device, target)[: memory.nbytes].view(strips, -1)
    assert torch.equal(found[:, own - 100 : own + 200].flatten(), read(device, source)[:900])
    assert not found[:, : own - 100].any()
    assert not found[:, own + 200 :].any()


def test_an_event_orders_two_streams(device: Device) -> None:
    first, second, source, target = device.stream(), device.stream(), numbers(device), device.pinned(SIZE)
    memory, copied = device.allocate(SIZE), device.event()
    first.copy(memory, source)
    copied.record(first)
    second.wait(copied)
    second.copy(target, memory)
    second.synchronize()
    assert torch.equal(read(device, target), source)


def test_a_stream_waits_for_another_ones_work_so_far(device: Device) -> None:
    first, second, source, target = device.stream(), device.stream(), numbers(device), device.pinned(SIZE)
    memory = device.allocate(SIZE)
    first.copy(memory, source)
    second.wait_stream(first)
    second.copy(target, memory)
    second.synchronize()
    assert torch.equal(read(device, target), source)


@pytest.mark.parametrize("by_event", [False, True])
def test_the_host_waits_for_what_a_stream_waits_for(device: Device, by_event: bool) -> None:
    """Also if the stream has no work behind its wait."""
    first, second, source, target = device.stream(), device.stream(), numbers(device), device.pinned(SIZE)
    memory = device.allocate(SIZE)
    first.copy(memory, source)
    first.copy(target, memory)
    second.wait_stream(first)
    if by_event:
        waited = device.event()
        waited.record(second)
        waited.synchronize()
    else:
        second.synchronize()
    assert torch.equal(read(device, target), source)


def test_the_host_waits_for_an_event_and_may_then_write_the_source(device: Device) -> None:
    stream, memory, target = device.stream(), device.allocate(SIZE), device.pinned(SIZE)
    source, found = numbers(device), []
    for seed in range(4):
        device.check_host_access(source, write=True)
        source.fill_(seed)
        copied = device.event()
        stream.copy(memory, source)
        copied.record(stream)
        stream.copy(target, memory)
        copied.synchronize()
        stream.synchronize()
        found.append(int(read(device, target)[SIZE // 2]))
    assert found == [0, 1, 2, 3]


def test_an_event_is_done_at_some_time(device: Device) -> None:
    stream, copied = device.stream(), device.event()
    source, memory = numbers(device), device.allocate(SIZE)
    stream.copy(memory, source)
    copied.record(stream)
    deadline = time.monotonic() + 20
    while not copied.query():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    device.check_host_access(source, write=True)


def test_an_event_may_be_recorded_again(device: Device) -> None:
    first, second, memory = device.stream(), device.stream(), device.allocate(SIZE)
    target, moved = device.pinned(SIZE), device.event()
    first.fill(memory, 1)
    moved.record(first)
    first.fill(memory, 2)
    moved.record(first)
    second.wait(moved)
    second.copy(target, memory)
    second.synchronize()
    assert (read(device, target) == 2).all()


def test_waiting_for_an_event_that_was_not_recorded_is_refused(device: Device) -> None:
    with pytest.raises(RuntimeError, match="was not recorded"):
        device.stream().wait(device.event())


def test_a_copy_of_pageable_memory_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="pinned"):
        device.stream().copy(device.allocate(100), torch.zeros(100, dtype=torch.uint8))


def test_a_copy_between_unequal_sizes_is_refused(device: Device) -> None:
    source, memory = device.pinned(100), device.allocate(101)
    with pytest.raises(ValueError, match="equal"):
        device.stream().copy(memory, source)


def test_the_device_waits_for_all_of_its_streams(device: Device) -> None:
    targets = [device.pinned(SIZE) for _ in range(4)]
    for number, target in enumerate(targets):
        stream, memory = device.stream(), device.allocate(SIZE)
        stream.fill(memory, number)
        stream.copy(target, memory)
        device.current_stream().wait_stream(stream)  # which frees the memory
    device.synchronize()
    assert [int(read(device, target)[SIZE - 1]) for target in targets] == [0, 1, 2, 3]


def test_operations_of_torch_run_in_the_order_of_the_active_stream(device: Device) -> None:
    stream, source, target = device.stream(), numbers(device, size=4000), device.pinned(4000)
    memory = device.allocate(4000)
    stream.copy(memory, source)
    with stream.active():
        assert device.current_stream().handle == stream.handle
        doubled = memory.to(torch.int32).mul_(2).remainder_(256).to(torch.uint8)
        stream.copy(target, doubled)
    stream.synchronize()
    assert torch.equal(read(device, target), (source.to(torch.int32) * 2 % 256).to(torch.uint8))
    assert device.current_stream().handle == device.default_stream().handle


def test_threads_have_current_streams_of_their_own(device: Device) -> None:
    found: list[int] = []
    with device.stream().active():
        thread = threading.Thread(target=lambda: found.append(device.current_stream().handle))
        thread.start()
        thread.join()
    assert found == [device.default_stream().handle]


def test_memory_is_aligned_and_counted(device: Device) -> None:
    before = device.free_bytes()
    memory = device.allocate(64 << 20)
    assert memory.data_ptr() % 256 == 0
    assert before - device.free_bytes() >= 64 << 20
    del memory
    assert device.free_bytes() == before


def test_memory_that_does_not_fit_is_refused(device: Device) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(device.facts.memory_bytes + 1)


def test_facts_are_those_of_a_card(device: Device) -> None:
    facts = device.facts
    assert facts.name
    assert facts.capability >= (5, 0)
    assert facts.multiprocessors > 0
    assert facts.memory_bytes >= 1 << 30


def test_a_graph_replays_its_step_with_new_inputs(device: Device) -> None:
    x = device.allocate(4000).view(torch.float32)
    x.fill_(1.0)
    replay = device.record_graph(lambda: (x * 3).sum().reshape(1))
    for value in (2.0, 5.0):
        x.fill_(value)
        assert float(replay()) == 3000 * value


def test_a_step_that_waits_for_the_device_is_not_recorded(device: Device) -> None:
    x, before = device.allocate(4).view(torch.float32), device.current_stream().handle
    x.fill_(1.0)
    with pytest.raises(RuntimeError, match="waits for the device"):
        device.record_graph(lambda: x * float(x))
    assert device.current_stream().handle == before
    assert float(device.record_graph(lambda: x + 1)()) == 2.0


def test_many_threads_use_one_device(device: Device) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        stream, source, target = device.stream(), numbers(device, seed), device.pinned(SIZE)
        memory = device.allocate(SIZE)
        for _ in range(3):
            stream.copy(memory, source)
            stream.copy(target, memory)
            stream.synchronize()
        if not torch.equal(target, source):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
