"""Staging memory: memory into which one session writes new chunks.

Only the worker and the daemon share it. If the worker streams its chunks, only the daemon maps it. Writes after Commit
are harmless: the daemon copies the chunk at Commit and verifies its copy.
"""

from __future__ import annotations

from kvsidecar.range_allocator import RangeAllocator

from cache_daemon.memory.arena import ALIGNMENT, Slot, footprint
from cache_daemon.memory.shared_memory import SharedMemory

# Idle staging keeps the first number of bytes; memory beyond it is released in pieces of the second size.
_KEPT_BYTES, _TRIM_BYTES = 8 << 20, 16 << 20


class StagingBudget:
    """Memory budget that several staging memories share."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes, self.used_bytes = size_bytes, 0


class StagingMemory:
    """Staging memory of one session, allocated with its first reservation.

    If ``budget`` is None, only its own size limits it. With a budget, freed memory returns to the system at once;
    otherwise the idle memory of a caller's many sessions would exceed the caller's limit.
    """

    def __init__(self, size_bytes: int, budget: StagingBudget | None = None) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self._budget = budget if budget is not None else StagingBudget(self.size_bytes)
        self._keeps_idle = budget is None
        self._pages = RangeAllocator(self.size_bytes // ALIGNMENT)
        self._shared: SharedMemory | None = None
        self._trim_from: int | None = None

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory. Raises ConfigurationError when the system refuses the memory."""
        return self._memory().descriptor

    @property
    def used_bytes(self) -> int:
        return (self._pages.capacity - self._pages.free_units) * ALIGNMENT

    def allocate(self, size_bytes: int) -> Slot | None:
        """Allocate a range, or return None when there is no space."""
        room = self._budget.size_bytes - self._budget.used_bytes
        page = self._pages.allocate(-(-size_bytes // ALIGNMENT)) if footprint(size_bytes) <= room else None
        if page is None:
            return None
        self._budget.used_bytes += footprint(size_bytes)
        self._trim_from = _KEPT_BYTES
        return Slot(page * ALIGNMENT, size_bytes)

    def free(self, slot: Slot) -> None:
        self._budget.used_bytes -= footprint(slot.size_bytes)
        self._pages.free(slot.offset // ALIGNMENT)
        if not self._keeps_idle and self._shared is not None:
            self._shared.release_pages(slot.offset, footprint(slot.size_bytes))

    def view(self, slot: Slot) -> memoryview:
        """Return a range's bytes, which the worker may change at any time."""
        return self._memory().memory[slot.offset : slot.offset + slot.size_bytes]

    def trim(self) -> None:
        """Release a piece of idle memory; call it periodically on the event loop.

        Nothing can be reserved during the call, which takes a millisecond or two.
        """
        if self._trim_from is None or self.used_bytes or self._shared is None:
            return
        length = min(_TRIM_BYTES, self.size_bytes - self._trim_from)
        if length > 0:
            self._shared.release_pages(self._trim_from, length)
        self._trim_from = self._trim_from + length if length > 0 else None

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _memory(self) -> SharedMemory:
        if self._shared is None:
            self._shared = SharedMemory("staging", self.size_bytes, writable_by_others=True)
        return self._shared
