"""Devices of the contract tests: simulated devices with three schedules, and a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kvkernels.device.device_port import Device
from kvkernels.device.visible_devices import device_of

from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.device.simulated_tensor import add_simulated_device

PLACES = [
    *(f"simulated, work runs {schedule.value}" for schedule in Schedule),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def simulated() -> Iterator[Callable[..., SimulatedDevice]]:
    """Create simulated devices that torch can use; close them at the end of the ``with`` block."""
    made = []

    def make(**options: object) -> SimulatedDevice:
        device = SimulatedDevice(**options)  # type: ignore[arg-type]
        add_simulated_device(device)
        made.append(device)
        return device

    yield make
    for device in made:
        device.close()


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, simulated: Callable[..., SimulatedDevice]) -> Device:
    if request.param == "cuda":
        return device_of(torch.device("cuda", 0))
    return simulated(schedule=Schedule(request.param.removeprefix("simulated, work runs ")))
