"""Devices for a pool: a simulated device on every machine, and a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from kvkernels import dispatch
from kvkernels.cuda.chunk_transfer import ChunkTransfer
from kvkernels.cuda.kernel_select import SelectedKernels
from kvkernels.device.visible_devices import device_of

from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.emulated.conftest import library


def dispatch_doubles(device: SimulatedDevice) -> dict[str, Callable[..., Any]]:
    """Return what replaces functions of ``kvkernels.dispatch``, so that the emulator runs the device's kernels."""
    kernels = SelectedKernels(SimulatedKernels(device, library()), "the emulator's")
    return {
        "kernels_for": lambda place: kernels,
        "_transfer": cache(lambda place, use: ChunkTransfer(device_of(place))),
    }


PLACES = [*Schedule, pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A simulated device, on which the emulator runs our kernels, on streams with delays."""
    schedule = getattr(request, "param", Schedule.DELAYED)
    simulated = SimulatedDevice(schedule=schedule)
    add_simulated_device(simulated)
    for name, double in dispatch_doubles(simulated).items():
        monkeypatch.setattr(dispatch, name, double)
    yield simulated
    simulated.close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    """The pool's device. A simulated or a real copy engine transfers chunks to it."""
    if request.param == "cuda":
        return torch.device("cuda", 0)
    simulated: SimulatedDevice = request.getfixturevalue("device")
    simulated.schedule = request.param
    return simulated.torch


def keep_busy(place: torch.device) -> None:
    """Occupy a GPU's current stream for a few milliseconds, so that later work on the stream is late."""
    if place.type == "cuda":
        cuda: Any = torch.cuda
        cuda._sleep(20_000_000)
