"""Arenas: memory that the daemon owns and workers map for reading."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_HOST, ArenaDescriptor
from kvsidecar.range_allocator import RangeAllocator

from cache_daemon.memory.shared_memory import SharedMemory

ALIGNMENT = 4096
# Pages are created this far ahead of use, so that a copy does not wait for the kernel to zero them.
_POPULATE_AHEAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of an arena. ``size_bytes`` is the payload's size, not the rounded allocation."""

    offset: int
    size_bytes: int


def footprint(size_bytes: int) -> int:
    """Return the arena bytes that a payload occupies."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Arena(Protocol):
    """Memory with an allocator. Only ``read`` and ``write`` are thread-safe."""

    size_bytes: int

    @property
    def used_bytes(self) -> int: ...

    def allocate(self, size_bytes: int) -> Slot | None:
        """Allocate a slot, or return None when no free range is long enough."""
        ...

    def free(self, slot: Slot) -> None: ...

    def read(self, slot: Slot) -> memoryview:
        """Return the slot's memory."""
        ...

    def write(self, slot: Slot, data: memoryview) -> None:
        """Fill a slot, without the GIL."""
        ...

    def describe(self) -> ArenaDescriptor:
        """Return the descriptor by which a worker maps the arena."""
        ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class SlotAllocator:
    """Allocator of arena slots, common to all arenas."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self._pages = RangeAllocator(self.size_bytes // ALIGNMENT)

    @property
    def used_bytes(self) -> int:
        return (self._pages.capacity - self._pages.free_units) * ALIGNMENT

    def allocate(self, size_bytes: int) -> Slot | None:
        page = self._pages.allocate(-(-size_bytes // ALIGNMENT))
        return None if page is None else Slot(page * ALIGNMENT, size_bytes)

    def free(self, slot: Slot) -> None:
        self._pages.free(slot.offset // ALIGNMENT)

    def check_integrity(self) -> None:
        self._pages.check_integrity()


class MemoryArena(SlotAllocator):
    """Arena in this process's memory: the reference implementation."""

    def __init__(self, size_bytes: int, memory: memoryview | None = None) -> None:
        super().__init__(size_bytes)
        self._memory = memory if memory is not None else memoryview(bytearray(self.size_bytes))

    def read(self, slot: Slot) -> memoryview:
        return self._memory[slot.offset : slot.offset + slot.size_bytes]

    def write(self, slot: Slot, data: memoryview) -> None:
        copy_bytes(self.read(slot), data)

    def describe(self) -> ArenaDescriptor:
        return ArenaDescriptor(size_bytes=self.size_bytes)

    def close(self) -> None:
        self._memory.release()


class HostArena(MemoryArena):
    """Arena in shared host memory: other processes can read it, none can write.

    The kernel adds pages on first use. Raises ConfigurationError when the system refuses the memory.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self._shared = SharedMemory("arena", size_bytes, writable_by_others=False)
        super().__init__(size_bytes, self._shared.memory)
        self._populated = 0
        self._populating: threading.Thread | None = None

    @property
    def descriptor(self) -> int:
        return self._shared.descriptor

    def allocate(self, size_bytes: int) -> Slot | None:
        slot = super().allocate(size_bytes)
        if slot is not None:
            self._populate_ahead(slot.offset + footprint(slot.size_bytes))
        return slot

    def describe(self) -> ArenaDescriptor:
        return ArenaDescriptor(kind=ARENA_KIND_HOST, size_bytes=self.size_bytes)

    def close(self) -> None:
        if self._populating is not None:
            self._populating.join()
        self._shared.close()

    def _populate_ahead(self, used: int) -> None:
        """Create pages beyond offset ``used``, a multiple of a page: the allocator grants low offsets first."""
        if self._populated >= self.size_bytes or used + _POPULATE_AHEAD_BYTES // 2 < self._populated:
            return
        if self._populating is not None and self._populating.is_alive():
            return
        first = max(self._populated, used)
        self._populated = min(self.size_bytes, first + _POPULATE_AHEAD_BYTES)
        work = self._shared.populate, (first, self._populated - first)
        self._populating = threading.Thread(target=work[0], args=work[1], name="arena-populate", daemon=True)
        self._populating.start()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal length without the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
