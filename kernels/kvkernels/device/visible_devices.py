"""Visible devices: the devices of this process, by torch's names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvkernels.device.cuda_device import CudaDevice
from kvkernels.device.device_port import Device

_makers: dict[str, Callable[[torch.device], Device]] = {"cuda": CudaDevice}
_devices: dict[torch.device, Device] = {}
_lock = threading.Lock()


def device_of(device: torch.device) -> Device:
    """Return the port of a torch device, one object per device. Raises ValueError for a CPU."""
    if device.type not in _makers:
        raise ValueError(f"device is {device}, which has no streams; allowed are {', '.join(_makers)}")
    if device.index is None:
        device = torch.device(device.type, _current_ordinal(device.type))
    with _lock:
        if device not in _devices:
            _devices[device] = _makers[device.type](device)
        return _devices[device]


def is_device(device: torch.device) -> bool:
    """Return True if a device has a port (a CPU has none)."""
    return device.type in _makers


def add_device_type(name: str, make: Callable[[torch.device], Device]) -> None:
    """Make the devices of one of torch's types known. Tests add their simulated device."""
    with _lock:
        _makers[name] = make
        for device in [d for d in _devices if d.type == name]:
            del _devices[device]


def has_cuda() -> bool:
    """Return whether torch sees a CUDA device. The first call initializes the driver."""
    return torch.cuda.is_available()


def cuda_devices() -> list[torch.device]:
    """Return the CUDA devices that torch sees."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def _current_ordinal(kind: str) -> int:
    module: Any = torch.cuda if kind == "cuda" else getattr(torch, kind)
    return int(module.current_device())
