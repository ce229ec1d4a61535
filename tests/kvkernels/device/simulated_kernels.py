"""Simulated launches of our kernels: the emulator runs them as work of a stream, and their addresses are checked."""

from __future__ import annotations

import ctypes
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

from kvkernels.cuda.cuda_library import KernelLaunchError, Kernels

from tests.kvkernels.device.access_order import call_site
from tests.kvkernels.device.device_fault import DeviceFault, HostAddress, PageableMemory
from tests.kvkernels.device.simulated_device import SimulatedDevice, Use, find_block
from tests.kvkernels.device.virtual_clock import COMPUTE

# Names of the fields that a kernel writes, by the beginning of the kernel's name.
_WRITES = {
    "pack": ("payloads",),
    "unpack": ("pool_keys", "pool_values"),
    "attention": ("output", "lse", "part_output", "part_lse"),
    "combine": ("output", "lse"),
    "awq": ("output", "parts"),
    "add_norm": ("hidden", "output"),
    "rope": ("queries", "keys", "values"),
    "silu_and_mul": ("output",),
}
_MAX_GRID_YZ, _MAX_THREADS = 65_535, 1024
_emulator = threading.Lock()  # the emulator has only one state


class SimulatedKernels:
    """Kernels of a simulated device. The memory of a launch is checked when the launch is enqueued."""

    def __init__(self, device: SimulatedDevice, emulated: Kernels) -> None:
        self._device, self._emulated = device, emulated

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        device, card = self._device, self._device.card
        card.check_registers(name, threads)
        if shared_bytes > card.shared_bytes or threads > _MAX_THREADS or max(grid[1:]) > _MAX_GRID_YZ:
            raise KernelLaunchError(
                f"{name} on a grid of {tuple(grid)}: {threads} threads and {shared_bytes} bytes of shared memory; "
                f"{card.name} has {_MAX_THREADS} threads and {card.shared_bytes} bytes for a block"
            )
        device.launched.append(name)
        held, on = type(params).from_buffer_copy(params), device.stream_of(stream)
        try:
            uses = _uses(name, held, int(grid[2]))
        except DeviceFault as fault:
            device.kill(str(fault))
            raise

        def work(_: random.Random) -> None:
            with _emulator:
                self._emulated.launch(name, grid, threads, shared_bytes, held, 0)

        seconds = device.clock.kernel_seconds(_traffic(held, threads * math.prod(grid)))
        device.enqueue(on, f"{name} at {call_site()}", uses, COMPUTE, seconds, work)

    def has(self, name: str, params: type[ctypes.Structure]) -> bool:
        return self._emulated.has(name, params)


def _uses(name: str, params: Any, layers: int) -> list[Use]:
    """Return the memory of a launch: from each address to the end of the block, or of the layers that it uses."""
    kernel = next(kind for kind in _WRITES if name.startswith(kind))
    found = []
    for field, kind in params._fields_:
        address = getattr(params, field)
        if kind is not ctypes.c_void_p or not address:
            continue
        try:
            block = find_block(address)
        except PageableMemory as error:
            raise HostAddress(f"{name} is given the host's address {address:#x} as {field}") from error
        if block.pinned:
            raise HostAddress(f"{name} is given pinned memory as {field}, allocated at {block.site}")
        start, end = address - block.address, block.size_bytes
        if field.startswith("pool_"):
            layer_bytes = 2 * params.layer_stride
            start, end = start + params.first_layer * layer_bytes, start + (params.first_layer + layers) * layer_bytes
        elif field in ("keys", "values") and hasattr(params, "kv_head_stride"):
            end = min(end, start + 2 * params.kv_heads * params.kv_head_stride)
        found.append(Use(block, start, end, field in _WRITES[kernel], field.startswith("pool_")))
    return found


def _traffic(params: Any, num_threads: int) -> float:
    """Return the bytes of keys and values that a pack or unpack kernel reads and writes; 0 for other kernels."""
    return 2.0 * 2 * 2 * params.channels * num_threads if hasattr(params, "channels") else 0.0
