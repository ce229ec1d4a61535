"""Managed memory, on a driver that keeps a list of the hints that it gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kvkernels.cuda.cuda_driver import PrimaryContext
from kvkernels.device.device_port import DeviceLacks
from kvkernels.device.managed_memory import ManagedMemory

from tests.kvkernels.doubles.fake_driver import FakeDriver

PREFETCH, PREFERRED_LOCATION, ACCESSED_BY, HOST = 0, 3, 5, -1


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    found = FakeDriver.for_test(devices=2)
    yield found
    found.close()


@pytest.mark.usefixtures("driver")
def test_torch_learns_address_and_size() -> None:
    with PrimaryContext(1).current():
        memory = ManagedMemory(1, 1 << 20)
    described = memory.__cuda_array_interface__
    assert (described["shape"], described["data"], described["typestr"]) == ((1 << 20,), (memory.address, False), "|u1")


def test_parts_stay_where_they_are_placed(driver: FakeDriver) -> None:
    with PrimaryContext(1).current():
        memory = ManagedMemory(1, 1 << 20)
        memory.keep_on_device(0, 1 << 16)
        memory.keep_on_host(1 << 16, 3 << 16)
    device, host = (memory.address, 1 << 16), (memory.address + (1 << 16), 3 << 16)
    assert driver.hints == [
        (*device, PREFERRED_LOCATION, 1),
        (*device, PREFETCH, 1),
        (*host, PREFERRED_LOCATION, HOST),
        (*host, ACCESSED_BY, 1),
    ]


def test_a_device_without_managed_memory_is_named(driver: FakeDriver) -> None:
    driver.lack_managed_memory()
    with PrimaryContext(0).current(), pytest.raises(DeviceLacks, match="concurrentManagedAccess"):
        ManagedMemory(0, 1 << 20)


@pytest.mark.usefixtures("driver")
def test_too_large_a_size_is_out_of_memory() -> None:
    with PrimaryContext(0).current(), pytest.raises(torch.OutOfMemoryError, match="cuMemAllocManaged"):
        ManagedMemory(0, 1 << 46)


@pytest.mark.usefixtures("driver")
def test_an_error_of_the_driver_is_named() -> None:
    PrimaryContext(0)  # not current
    with pytest.raises(DeviceLacks, match=r"cuMemAllocManaged: invalid device context \(CUDA driver, 201\)"):
        ManagedMemory(0, 1 << 20)
