"""Weight placements: host or device memory for a streamed model's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from kvkernels.cpu import large_pages
from kvkernels.device.device_port import Device
from kvkernels.device.visible_devices import device_of
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.process.free_memory import free_bytes
from torch import Tensor

from inference_svc.models.layer_streaming.device_slots import POISON, DeviceSlots
from inference_svc.models.layer_streaming.layer_file import LayerFile
from inference_svc.models.layer_streaming.pinned_pieces import (
    PinnedPieces,
    ResidentPieces,
    RingPieces,
    locked_bytes,
)
from inference_svc.models.layer_streaming.read_ahead import ReadAhead
from inference_svc.models.layer_streaming.residency_plan import ResidencyPlan, StreamingOptions

log = structlog.get_logger("model")

# Host memory in bytes that pinned weights leave free.
_SPARE_BYTES = 1 << 30
# The pinned ring has this many slots more than the device: copies read some while the next piece is read from the file.
_MORE_RING_SLOTS = 2


@dataclass(frozen=True)
class Extent:
    """Bytes of a layer file that one read loads."""

    at: int
    size_bytes: int


class WeightPlacement(Protocol):
    """Memory in which a model's weights are used."""

    device: torch.device

    def free_bytes(self, asked: StreamingOptions) -> int:
        """Return the number of free bytes for weights, slots and pool."""
        ...

    def place(self, weight: Tensor) -> Tensor:
        """Return a weight or vector in the memory where layers use it, copied there if it is in other memory."""
        ...

    def slots(self, residency: ResidencyPlan) -> list[Tensor]:
        """Allocate the plan's slots, uint8 ``[slot_bytes]`` each."""
        ...

    def read_ahead(
        self, file: LayerFile, extents: Sequence[Extent], slots: list[Tensor], asked: StreamingOptions
    ) -> ReadAhead | DeviceSlots:
        """Read the extents ahead into the slots. Raises OSError, and ConfigurationError if the host has no memory."""
        ...


class HostPlacement:
    """Weights in host memory; slots are filled from the file."""

    device = torch.device("cpu")

    def free_bytes(self, asked: StreamingOptions) -> int:
        return free_bytes(asked.memory_bytes)

    def place(self, weight: Tensor) -> Tensor:
        return weight

    def slots(self, residency: ResidencyPlan) -> list[Tensor]:
        size = residency.slot_bytes
        memory = large_pages.allocate(residency.slots * size)
        return [memory[i * size : (i + 1) * size] for i in range(residency.slots)]

    def read_ahead(
        self, file: LayerFile, extents: Sequence[Extent], slots: list[Tensor], asked: StreamingOptions
    ) -> ReadAhead:
        views = [slot.numpy().data for slot in slots]

        def read(number: int, slot: int, go_on: Callable[[], bool]) -> int:
            extent = extents[number]
            return file.read(views[slot][: extent.size_bytes], extent.at, go_on)

        def poison(slot: int) -> None:
            slots[slot].fill_(POISON)

        return ReadAhead(len(extents), len(slots), read, poison if asked.poison_freed_slots else None)


class DevicePlacement:
    """Weights in device memory; slots are filled from pinned host memory.

    The host pins all streamed weights if they fit. If not, it pins a ring, which a thread fills from the file.
    """

    def __init__(self, device: Device) -> None:
        self._device, self.device = device, device.torch

    def free_bytes(self, asked: StreamingOptions) -> int:
        return self._device.free_bytes()

    def place(self, weight: Tensor) -> Tensor:
        return weight.to(self.device)

    def slots(self, residency: ResidencyPlan) -> list[Tensor]:
        return [self._device.allocate(residency.slot_bytes) for _ in range(residency.slots)]

    def read_ahead(
        self, file: LayerFile, extents: Sequence[Extent], slots: list[Tensor], asked: StreamingOptions
    ) -> DeviceSlots:
        def read(number: int, memory: Tensor, go_on: Callable[[], bool]) -> int:
            return file.read(memory.numpy().data, extents[number].at, go_on)

        sizes = [extent.size_bytes for extent in extents]
        free, ring = free_bytes(asked.memory_bytes), len(slots) + _MORE_RING_SLOTS
        pieces: PinnedPieces
        if sum(map(locked_bytes, sizes)) + _SPARE_BYTES <= free:
            pieces = ResidentPieces(self._device, sizes, read)
        else:
            pinned = ring * locked_bytes(max(sizes))
            if pinned > free:
                raise ConfigurationError(
                    f"layers are streamed through {format_size(pinned)} of pinned host memory ({ring} layers), and "
                    f"{format_size(free)} are free; lower stream_slots (now {asked.slots}), or free host memory"
                )
            log.info(
                "pinned weights exceed the host's memory: a pinned ring is filled from the file",
                weights=format_size(sum(sizes)),
                pinned=format_size(sum(map(locked_bytes, sizes))),
                free=format_size(free),
                ring=format_size(pinned),
            )
            pieces = RingPieces(self._device, sizes, ring, read)
        return DeviceSlots(self._device, pieces, slots, asked.poison_freed_slots)


def placement_on(device: torch.device) -> WeightPlacement:
    """Return the placement of a model that computes on a device."""
    return HostPlacement() if device.type == "cpu" else DevicePlacement(device_of(device))
