"""Defects of loads that overlap the engine's steps: the simulated device names each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kvkernels import dispatch
from kvkernels.chunk_payload import ChunkPlacement, LoadedLayers
from kvkernels.cuda import chunk_transfer
from kvkernels.cuda.chunk_transfer import BANK_BYTES
from torch import Tensor

from tests.kvkernels.device.device_fault import UnorderedAccess
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_stream import Schedule, SimulatedEvent, SimulatedStream
from tests.kvkernels.doubles import device_place
from tests.kvkernels.test_chunk_transfer import LAYERS, header_of, packed_by_definition, pool

GROUPS = [range(i, i + 1) for i in range(LAYERS)]
device = device_place.device  # fixture
pytestmark = pytest.mark.parametrize("device", Schedule, indirect=True, ids=lambda schedule: schedule.value)


class Load:
    """Load of a few chunks, a layer at a time."""

    def __init__(self, device: SimulatedDevice) -> None:
        header, stored = header_of(40), pool(120)
        self.device, self.stored = device, stored[0]
        self.pieces = [
            ChunkPlacement(header, memoryview(packed_by_definition(*stored, slots, header)), slots)
            for slots in torch.arange(120).split(40)
        ]
        self.keys, self.values = (torch.zeros_like(x).to(device.torch) for x in stored)

    def __iter__(self) -> Iterator[LoadedLayers]:
        return dispatch.unpack_chunks(self.keys, self.values, self.pieces, GROUPS)

    def layer(self, number: int) -> Tensor:
        return self.keys[number] * 2


def wait(load: Load, loaded: LoadedLayers) -> None:
    assert loaded.ready is not None
    load.device.current_stream().wait(loaded.ready)


def missing_wait_for_a_group(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in load:
        load.layer(loaded.layers.start)


def wait_for_the_group_before(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    before = None
    for loaded in load:
        if before is not None:
            wait(load, before)
            load.layer(loaded.layers.start)
        before = loaded


def pinned_memory_filled_before_it_is_copied(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEvent, "query", lambda event: True)
    list(load)


def device_memory_filled_before_it_is_unpacked(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    next_bank = chunk_transfer._Lane.next_bank

    def forgetful(lane: chunk_transfer._Lane, size_bytes: int) -> chunk_transfer._Bank:
        for bank in lane.banks:
            bank.unpacked = None
        return next_bank(lane, size_bytes)

    monkeypatch.setattr(chunk_transfer._Lane, "next_bank", forgetful)
    list(load)


def kernel_launched_before_its_payloads_are_copied(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedStream, "wait", lambda stream, event: None)
    list(load)


def blocks_reused_while_they_are_loaded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is gone, and nobody has waited for the device."""
    list(load)
    load.keys[-1].fill_(0)


@pytest.mark.parametrize(
    "defect",
    [
        missing_wait_for_a_group,
        wait_for_the_group_before,
        pinned_memory_filled_before_it_is_copied,
        device_memory_filled_before_it_is_unpacked,
        kernel_launched_before_its_payloads_are_copied,
        blocks_reused_while_they_are_loaded,
    ],
    ids=lambda defect: defect.__name__,
)
def test_a_defect_is_named(
    device: SimulatedDevice, defect: Callable[[Load, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(device)
    with pytest.raises(UnorderedAccess), monkeypatch.context() as broken:
        defect(load, broken)
    device.synchronize()


def test_without_them_nothing_is_reported(device: SimulatedDevice) -> None:
    load = Load(device)
    for loaded in load:
        wait(load, loaded)
        number = loaded.layers.start
        assert torch.equal(load.layer(number).cpu(), load.stored[number] * 2)


def test_banks_grow_without_a_wait_for_kernels(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old device memory is freed in the order of the kernels that read it."""
    monkeypatch.setattr(chunk_transfer, "_MIN_BANK_BYTES", 1)
    monkeypatch.setattr(chunk_transfer, "_GRANULARITY", 256)
    load, transfer, sizes = Load(device), dispatch._transfer(device.torch, "unpack"), list[int]()
    for count in (1, 2, 3):
        some, waits = load.pieces[:count] * 40, device.clock.num_host_waits
        list(dispatch.unpack_chunks(load.keys, load.values, some, GROUPS))  # no step waits, so only the lane does
        assert device.clock.num_host_waits - waits <= len(GROUPS)
        lane = transfer._lanes.get_nowait()
        sizes += [bank.size_bytes for bank in lane.banks]
        transfer._lanes.put(lane)
    assert all(0 < size < BANK_BYTES for size in sizes[-2:])
    assert 0 < sizes[0] < sizes[2] <= sizes[4] < BANK_BYTES, sizes
    device.synchronize()
