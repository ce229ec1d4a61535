"""Facts of the card, and the build of the kernels for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from typing import Any

import torch
from kvkernels.cuda import cuda_build, emulator, kernel_select, nvrtc
from kvkernels.cuda.cuda_driver import PrimaryContext
from kvkernels.device.visible_devices import device_of

from benchmarks.first_contact.contact_device import ContactDevice, GpuDevice
from benchmarks.first_contact.row import RowFile

# For each fact: the number of its CUdevice_attribute, and why it matters.
_ATTRIBUTES = {
    "multiprocessors": (16, "blocks that run at a time"),
    "shared memory of a block": (97, "kernels of 256 channels need 67584 bytes"),
    "L2 cache bytes": (38, "timing must rotate more memory than this"),
    "host pointers of registered memory": (91, "none of ours are used"),
    "virtual memory management": (102, "a GPU arena needs it"),
    "memory shared by file descriptors": (103, "a GPU arena without legacy handles needs it"),
}


def read_facts(device: ContactDevice, rows: RowFile) -> None:
    """Read the driver's attributes of device 0, and the versions of installed software."""
    if not isinstance(device, GpuDevice):
        assert device.kernels  # loads the fake driver
    context, value = PrimaryContext(0), ctypes.c_int()
    for name, (number, why) in _ATTRIBUTES.items():
        context.check(name, context.c.cuDeviceGetAttribute(ctypes.byref(value), number, 0))
        rows.measured(name, str(value.value), why)
    context.check("version", context.c.cuDriverGetVersion(ctypes.byref(value)))
    rows.measured("CUDA of the driver", f"{value.value // 1000}.{value.value % 1000 // 10}")
    cuda: Any = torch.version.cuda
    rows.measured("torch", f"{torch.__version__}, CUDA {cuda}")
    compilers = [str(found.library) for found in nvrtc.find_compilers()]
    rows.measured("compilers", f"nvcc {cuda_build.find_nvcc() or 'none'}; NVRTC {', '.join(compilers) or 'none'}")
    if isinstance(device, GpuDevice):
        card = device_of(device.torch)
        (major, minor), free, total = card.facts.capability, card.free_bytes(), card.facts.memory_bytes
        rows.measured("card", f"{card.facts.name}, sm_{major}{minor}, {free >> 20} of {total >> 20} MiB free")
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = "driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit,ecc.mode.current"
        done = subprocess.run([smi, f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
        rows.measured("nvidia-smi", done.stdout.strip() or done.stderr.strip()[:200], query)


def build_kernels(device: ContactDevice, rows: RowFile) -> None:
    """Build the kernels for the card with nvcc or, without nvcc, with NVRTC; without a card, build the emulator."""
    began = time.monotonic()
    if not isinstance(device, GpuDevice):
        library = emulator.build()
        rows.passed("emulator", f"{time.monotonic() - began:.1f} s, {library.stat().st_size / 1e6:.1f} MB")
        return
    major, minor = device_of(device.torch).facts.capability
    architecture = 10 * major + minor
    if (nvcc := cuda_build.find_nvcc()) is not None and architecture in cuda_build.supported_architectures(nvcc):
        try:
            report = cuda_build.build(architectures=(architecture,))
        except RuntimeError as error:
            rows.failed(f"nvcc, sm_{architecture}", str(error)[-300:])
        else:
            spilled = sum(entry["spill_bytes"] for kernel in report.values() for entry in kernel.values())
            took = f"{time.monotonic() - began:.1f} s, {len(report)} kernels, {spilled} bytes spilled"
            rows.passed(f"nvcc, sm_{architecture}", took, "under 60 s")
    else:
        rows.measured("nvcc", f"none for sm_{architecture}; NVRTC compiles instead")
    began = time.monotonic()
    try:
        cubins = nvrtc.cached_cubins(f"sm_{architecture}")
    except RuntimeError as error:
        rows.failed(f"NVRTC, sm_{architecture}", str(error)[:300])
    else:
        rows.passed(f"NVRTC, sm_{architecture}", f"{time.monotonic() - began:.1f} s, {len(cubins)} cubins")
    chosen = kernel_select.kernels_for(device.torch)
    if chosen.kernels is None:
        rows.failed("a worker's kernels", chosen.why)
    else:
        rows.passed("a worker's kernels", chosen.why)
