"""GPU arena: GPU memory with the slots of copied chunks."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2 import ArenaDescriptor

from cache_daemon.memory.arena import Slot, SlotAllocator
from cache_daemon.memory.device_memory import DeviceMemory


class GpuArena(SlotAllocator):
    """Device memory, which it owns, with an allocator. Only ``read`` and ``write`` are thread-safe."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__(memory.size_bytes)
        self.memory = memory

    def read(self, slot: Slot) -> memoryview:
        """Return a copy of the slot's bytes."""
        return self.memory.read(slot.offset, slot.size_bytes)

    def write(self, slot: Slot, data: memoryview) -> None:
        """Fill a slot. The caller must not change ``data`` meanwhile."""
        self.memory.write(slot.offset, data)

    def describe(self) -> ArenaDescriptor:
        """Return the descriptor by which a worker imports the memory."""
        memory = self.memory
        return ArenaDescriptor(kind=memory.kind, size_bytes=self.size_bytes, device_uuid=memory.device_uuid)

    def close(self) -> None:
        self.memory.close()
