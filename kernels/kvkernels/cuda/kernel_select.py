"""Kernel selection for a CUDA device: fat library, cubin, NVRTC, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvkernels.cuda import nvrtc
from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels, SharedLibrary

LIBRARY = Path(__file__).parent.parent / "lib" / "libkvkernels.so"
VOLTA_CUBIN = LIBRARY.with_name("kvkernels_sm70.cubin")
_OLDEST = (7, 0)


@dataclass(frozen=True)
class SelectedKernels:
    """Kernels for a device, or None, with the reason in one sentence."""

    kernels: Kernels | None
    why: str


def first_working(*ways: tuple[str, Callable[[], Kernels]]) -> SelectedKernels:
    """Return the first source of kernels that loads, else every source's error."""
    reasons = []
    for name, way in ways:
        try:
            return SelectedKernels(way(), name)
        except (OSError, RuntimeError, KernelLaunchError) as error:
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    return SelectedKernels(None, "; ".join(reasons))


def load_library() -> Kernels:
    """Load the fat library. Raises OSError if it was not built or finds no device."""
    if not LIBRARY.exists():
        raise OSError("it has not been built (make kernels)")
    found = SharedLibrary(LIBRARY)
    if found.devices < 1:
        raise OSError("it reports no device" if found.devices in (0, -35, -100) else f"CUDA error {-found.devices}")
    return found


@cache
def kernels_for(device: torch.device) -> SelectedKernels:
    """Select the kernels for a device, once."""
    if device.type != "cuda":
        return SelectedKernels(None, "no CUDA device")
    capability = torch.cuda.get_device_capability(device)
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < _OLDEST:
        return SelectedKernels(None, f"{name} has no tensor cores")

    def compiled() -> Kernels:
        return nvrtc.CubinModule(nvrtc.cached_cubin(name))

    if capability < (7, 5):
        return first_working(
            ("library's cubin", lambda: nvrtc.CubinModule(VOLTA_CUBIN.read_bytes())), ("compiled by NVRTC", compiled)
        )
    return first_working(("fat library", load_library), ("compiled by NVRTC", compiled))


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device's tensor cores support a dtype: f16 from sm_70, bf16 from sm_80 on."""
    if dtype == torch.float16:
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
