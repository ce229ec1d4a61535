"""GPU arena: an arena in device memory, with the slots and leases of the host arena."""

from __future__ import annotations

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import ArenaDescriptor

from cache_daemon.memory.arena import Slot, SlotAllocator
from cache_daemon.memory.device_memory import DeviceMemory


class GpuArena(SlotAllocator):
    """Arena in device memory, which it owns.

    The daemon copies chunks from the sessions' staging in host memory, and reads them back for verification.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory.size_bytes)
        self.memory = memory

    def read(self, slot: Slot) -> memoryview:
        return self.memory.read(slot.offset, slot.size_bytes)

    def writable_view(self, slot: Slot) -> memoryview | None:
        return None

    def write(self, slot: Slot, data: memoryview) -> None:
        # Copied first: the owner may change ``data`` while the device reads.
        self.memory.write(slot.offset, memoryview(np.frombuffer(data, np.uint8).copy().data))

    def describe(self) -> ArenaDescriptor:
        memory = self.memory
        return ArenaDescriptor(kind=memory.kind, size_bytes=self.size_bytes, device_uuid=memory.device_uuid)

    def close(self) -> None:
        self.memory.close()
