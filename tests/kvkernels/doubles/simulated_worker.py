"""Worker process whose model, pool and chunk copies are on a simulated device.

The worker is the real one. Only the device behind the device port and the kernels behind the dispatch are doubles, and
``--device`` accepts the device's name.
"""

from __future__ import annotations

from typing import Any

import torch
from kvkernels import dispatch

from inference_svc.__main__ import main as worker_main
from inference_svc.models import loader
from inference_svc.server import preflight
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.doubles.device_place import dispatch_doubles


def install() -> None:
    """Add ``sim:0``, whose streams delay their work at random, and the emulator's kernels."""
    device = SimulatedDevice(schedule=Schedule.DELAYED)
    add_simulated_device(device)
    for name, double in dispatch_doubles(device).items():
        setattr(dispatch, name, double)
    any_loader: Any = loader
    any_loader.pick_device = torch.device
    any_preflight: Any = preflight
    any_preflight.check_device = lambda name: None


def main(arguments: list[str]) -> int:
    install()
    return worker_main(arguments)
