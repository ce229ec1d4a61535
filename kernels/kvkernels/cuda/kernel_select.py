"""Which of our CUDA kernels a device runs: the fat library's, a cubin's, NVRTC's, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvkernels.cuda import nvrtc
from kvkernels.cuda.cuda_library import KernelFailed, Kernels, SharedLibrary

LIBRARY = Path(__file__).parent.parent / "lib" / "libkvkernels.so"
VOLTA_CUBIN = LIBRARY.with_name("kvkernels_sm70.cubin")
_OLDEST = (7, 0)


@dataclass(frozen=True)
class Choice:
    """Kernels for a device, or None, and why in a sentence."""

    kernels: Kernels | None
    why: str


def attempt(*ways: tuple[str, Callable[[], Kernels]]) -> Choice:
    """The first way that works; else every way's reason."""
    reasons = []
    for name, way in ways:
        try:
            return Choice(way(), name)
        except (OSError, RuntimeError, KernelFailed) as error:
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    return Choice(None, "; ".join(reasons))


def library() -> Kernels:
    """The fat library. Raises OSError when it was not built or finds no device."""
    if not LIBRARY.exists():
        raise OSError("it has not been built (make kernels)")
    found = SharedLibrary(LIBRARY)
    if found.devices < 1:
        raise OSError("it reports no device" if found.devices in (0, -35, -100) else f"CUDA error {-found.devices}")
    return found


@cache
def kernels_for(device: torch.device) -> Choice:
    """The kernels for a device; decided once."""
    if device.type != "cuda":
        return Choice(None, "no CUDA device")
    capability = torch.cuda.get_device_capability(device)
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < _OLDEST:
        return Choice(None, f"{name} has no tensor cores")

    def compiled() -> Kernels:
        return nvrtc.Module(nvrtc.cached(name))

    if capability < (7, 5):
        return attempt(
            ("library's cubin", lambda: nvrtc.Module(VOLTA_CUBIN.read_bytes())), ("compiled by NVRTC", compiled)
        )
    return attempt(("fat library", library), ("compiled by NVRTC", compiled))


def takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device's tensor cores multiply a type: f16 from sm_70, bf16 from sm_80 on."""
    if dtype == torch.float16:
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
