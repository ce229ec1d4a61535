"""An arena in device memory: the same slots and leases as the host arena; only the memory differs."""

from __future__ import annotations

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import ArenaDescriptor

from cache_daemon.memory.arena import Slot, SlotAllocator
from cache_daemon.memory.device_memory import DeviceMemory


class GpuArena(SlotAllocator):
    """Owns its memory. Chunks come from the sessions' staging in host memory and are read back to be verified."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory.size_bytes)
        self.memory = memory

    def read(self, slot: Slot) -> memoryview:
        return self.memory.read(slot.offset, slot.size_bytes)

    def writable_view(self, slot: Slot) -> memoryview | None:
        return None

    def write(self, slot: Slot, data: memoryview) -> None:
        # Of its own, since whoever owns the data may change it while the device reads it.
        self.memory.write(slot.offset, memoryview(np.frombuffer(data, np.uint8).copy().data))

    def describe(self) -> ArenaDescriptor:
        memory = self.memory
        return ArenaDescriptor(kind=memory.kind, size_bytes=self.size_bytes, device_uuid=memory.device_uuid)

    def close(self) -> None:
        self.memory.close()
