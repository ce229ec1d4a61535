"""Kernel selection for a CUDA device: fat library, cubin, NVRTC, or none."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvkernels.cuda import cuda_sources, nvrtc
from kvkernels.cuda.cuda_driver import CubinModule
from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels, SharedLibrary
from kvkernels.device.visible_devices import device_of

LIBRARY = Path(__file__).parent.parent / "lib" / "libkvkernels.so"
VOLTA_CUBIN = LIBRARY.with_name("kvkernels_sm70.cubin")
_OLDEST = (7, 0)
# A refusal may be temporary (a starting driver, a full device). The search is repeated only after this time, because
# the caller of a kernel waits for it.
RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelectedKernels:
    """Kernels for a device, or None, with the reason in one sentence."""

    kernels: Kernels | None
    why: str
    refusals: str = ""  # errors of the sources that were tried before


class DeviceKernels:
    """A library's kernels, launched on one device whatever the thread's current device is."""

    def __init__(self, kernels: Kernels, guard: Callable[[], AbstractContextManager[Any]]) -> None:
        self._kernels, self._guard = kernels, guard

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        with self._guard():
            self._kernels.launch(name, grid, threads, shared_bytes, params, stream)

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        return self._kernels.has(name, params)


def first_working(*ways: tuple[str, Callable[[], Kernels]]) -> SelectedKernels:
    """Return the first source of kernels that loads, else every source's error."""
    reasons: list[str] = []
    for name, way in ways:
        try:
            return SelectedKernels(way(), name, "; ".join(reasons))
        except (OSError, RuntimeError, KernelLaunchError) as error:
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    return SelectedKernels(None, "; ".join(reasons))


def load_library(ordinal: int) -> Kernels:
    """Load the fat library for a device.

    Raises OSError if it was not built, finds no device, or was built from other sources or for other devices.
    """
    if not LIBRARY.exists():
        raise OSError("it has not been built (make kernels)")
    found = SharedLibrary(LIBRARY)
    if found.devices < 1:
        reasons = {0: "it reports no device", -100: "it reports no device"}
        reasons[-35] = "it reports no driver, or one that is older than its CUDA"
        raise OSError(reasons.get(found.devices, f"CUDA error {-found.devices}"))
    if found.fingerprint != cuda_sources.fingerprint("cuda"):
        raise OSError("it was built from other sources (make kernels)")
    device = device_of(torch.device("cuda", ordinal))
    capability = device.facts.capability
    if not found.runs_on(capability):
        names = found.architectures.replace("_", ", sm_")
        raise OSError(f"it was built for sm_{names}, and not for sm_{capability[0]}{capability[1]} (make kernels)")
    return DeviceKernels(found, device.guard)


class KernelSelection:
    """Kernels of every device, selected at first use. Thread-safe; a refusal is logged once and tried again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selected: dict[int, SelectedKernels] = {}
        self._refused: dict[int, tuple[float, SelectedKernels]] = {}
        self._logged: set[str] = set()

    def of(self, ordinal: int) -> SelectedKernels:
        """Return a device's kernels."""
        with self._lock:
            if (found := self._selected.get(ordinal)) is not None:
                return found
            if ordinal in self._refused and time.monotonic() < self._refused[ordinal][0]:
                return self._refused[ordinal][1]
            found = _select(ordinal)
            if found.kernels is not None:
                self._selected[ordinal] = found
                if found.refusals and LIBRARY.exists():
                    self._log_once(f"the kernels of cuda:{ordinal} are {found.why}, because: {found.refusals}")
            else:
                self._refused[ordinal] = time.monotonic() + RETRY_SECONDS, found
                self._log_once(f"our kernels cannot be used on cuda:{ordinal}, torch computes instead: {found.why}")
            return found

    def fits(self, ordinal: int, kernel: str, shared_bytes: int) -> bool:
        """Return whether a kernel fits a device's shared memory. A refusal is logged once."""
        limit = device_of(torch.device("cuda", ordinal)).facts.shared_bytes or shared_bytes
        if shared_bytes > limit:
            with self._lock:
                self._log_once(
                    f"{kernel} needs {shared_bytes} bytes of shared memory, and a block of cuda:{ordinal} has {limit}; "
                    "torch computes instead"
                )
        return bool(shared_bytes <= limit)

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.warning(text)


_selection = KernelSelection()


def kernels_for(device: torch.device) -> SelectedKernels:
    """Return the kernels of a device. Logs a refusal once."""
    if device.type != "cuda":
        return SelectedKernels(None, "no CUDA device")
    return _selection.of(_ordinal(device))


def fits(device: torch.device, kernel: str, shared_bytes: int) -> bool:
    """Return whether a kernel fits a device's shared memory. A refusal is logged once."""
    return _selection.fits(_ordinal(device), kernel, shared_bytes)


def _ordinal(device: torch.device) -> int:
    return device_of(device).torch.index or 0


def _select(ordinal: int) -> SelectedKernels:
    capability = device_of(torch.device("cuda", ordinal)).facts.capability
    name = f"sm_{capability[0]}{capability[1]}"
    if capability < _OLDEST:
        return SelectedKernels(None, f"{name} has no tensor cores")

    def compiled() -> Kernels:
        return CubinModule(nvrtc.cached_cubins(name), ordinal)

    if capability < (7, 5):
        return first_working(
            ("library's cubin", lambda: CubinModule([VOLTA_CUBIN.read_bytes()], ordinal)),
            ("compiled by NVRTC", compiled),
        )
    return first_working(("fat library", lambda: load_library(ordinal)), ("compiled by NVRTC", compiled))


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a device's tensor cores support a dtype: f16 from sm_70, bf16 from sm_80 on."""
    if dtype == torch.float16:
        return True
    return dtype == torch.bfloat16 and device_of(device).facts.capability >= (8, 0)
