"""Devices of first contact: a GPU, or the doubles that replace one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.cuda.kernel_select import kernels_for, supports
from kvkernels.device.visible_devices import device_of, has_cuda
from torch import Tensor

_REPLAYS = 10
_FAKE_PARTS = {
    "card": "a fake driver answers for the card",
    "build": "the emulator is built instead of the kernels",
    "kernels": "the emulator runs the kernels, launched through a fake driver",
    "contract": "doubles of the driver, the copy engine and graph capture",
    "engine": "the engine computes on the CPU; host memory stands for a GPU's; graphs are eager, over emulated kernels",
    "kernel_times": "times are those of the emulator and of torch on the CPU",
    "engine_times": "the engine computes on the CPU",
    "sanitizer": "the address sanitizer checks the emulator",
}


class GpuDevice:
    """The first GPU that torch sees."""

    name = "cuda"
    gpu_memory = "cuda"

    def __init__(self, model: str) -> None:
        self.torch = torch.device("cuda", 0)
        self.models = ("shape:qwen2.5-0.5b", *([model] if model else []))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if supports(self.torch, torch.bfloat16) else torch.float16

    @cached_property
    def kernels(self) -> Kernels:
        """Our kernels. Raises RuntimeError with the reason if they are not available."""
        chosen = kernels_for(self.torch)
        if chosen.kernels is None:
            raise RuntimeError(f"our kernels cannot be used: {chosen.why}")
        return chosen.kernels

    def extended(self, strips: int, device_bytes: int, host_bytes: int) -> Tensor:
        """Allocate strips that begin in device memory and end in host memory."""
        return device_of(self.torch).extended(strips, device_bytes, host_bytes)

    def times_us(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """Return the times of the calls, which are replayed as one CUDA graph after a warm-up."""
        card = device_of(self.torch)

        def step() -> Any:
            return [call() for call in calls][-1]

        replay = card.record_graph(step)
        replay()
        out = []
        for _ in range(_REPLAYS):
            start, end = card.event(timed=True), card.event(timed=True)
            start.record(card.current_stream())
            replay()
            end.record(card.current_stream())
            end.synchronize()
            out.append(end.milliseconds_since(start) * 1000 / len(calls))
        return out


class FakeDevice:
    """The fake driver, whose kernels the emulator runs; torch and the engine compute on the CPU."""

    name = "cpu"
    gpu_memory = "host"
    dtype = torch.float32

    def __init__(self, model: str) -> None:
        self.torch = torch.device("cpu")
        self.models = ("shape:tiny", *([model] if model else []))

    @cached_property
    def kernels(self) -> Kernels:
        from kvkernels.cuda.cuda_driver import CubinModule

        from tests.kvkernels.doubles.fake_driver import FakeDriver
        from tests.kvkernels.emulated.conftest import library

        FakeDriver().run_kernels_with(library()._c.kvk_launch)
        return CubinModule([b"any"], 0)

    def extended(self, strips: int, device_bytes: int, host_bytes: int) -> Tensor:
        """Allocate such strips in host memory only."""
        return torch.empty(strips, device_bytes + host_bytes, dtype=torch.uint8)

    def times_us(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """Return the calls' times on the CPU, which say nothing about a GPU."""
        calls[0]()
        began = time.perf_counter()
        calls[0]()
        return [(time.perf_counter() - began) * 1e6]


ContactDevice = GpuDevice | FakeDevice


def fake_parts(device: ContactDevice, step: str) -> str:
    """Name the parts of a step that a double replaced; empty on a GPU."""
    return "" if isinstance(device, GpuDevice) else f"no GPU: {_FAKE_PARTS[step]}"


def make_device(name: str, model: str) -> ContactDevice:
    """Make the device ``cuda`` or ``fake``. Raises RuntimeError if torch sees no GPU."""
    if name == "fake":
        return FakeDevice(model)
    if not has_cuda():
        raise RuntimeError(f"the driver has a GPU, but torch {torch.__version__} sees none")
    return GpuDevice(model)
