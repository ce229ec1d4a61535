"""Arenas: memory that the daemon owns and workers map.

A slot is a range of an arena. Its ``generation`` grows with every allocation, so that a reference to an
earlier use of the same bytes can be told from the current one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_HOST_FILE, ArenaDescriptor
from kvsidecar.errors import ConfigurationError
from kvsidecar.extents import Extents

ALIGNMENT = 4096
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True)
class Slot:
    """A range of an arena. ``size_bytes`` is the payload's, not the rounded allocation's."""

    arena_id: int
    offset: int
    size_bytes: int
    generation: int


class SharedFile:
    """Zeroed memory that other processes can map: a file in tmpfs, mode 0600, removed when closed.

    Raises ConfigurationError when the file system has no room for it.
    """

    def __init__(self, folder: Path, kind: str, size_bytes: int) -> None:
        self.path = folder / f"{kind}-{secrets.token_hex(8)}"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size_bytes)
            self._map = mmap.mmap(handle, size_bytes)
        except OSError as error:
            self.path.unlink()
            raise ConfigurationError(
                f"no room for the {kind} of {size_bytes} bytes in {folder}: {error.strerror}; "
                "choose a smaller --arena-bytes or another --arena-dir"
            ) from error
        finally:
            os.close(handle)
        with contextlib.suppress(OSError):  # kernels before 5.14 fault the pages in on first use instead
            self._map.madvise(_MADV_POPULATE_WRITE)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.memory.release()
        self._map.close()


class Arena(Protocol):
    """Memory with an allocator. Not thread-safe, but for ``read`` and ``writing``, which may be used on any thread."""

    arena_id: int
    size_bytes: int

    @property
    def used_bytes(self) -> int: ...

    def allocate(self, size_bytes: int) -> Slot | None:
        """Takes a slot, or returns None when no free range is long enough."""
        ...

    def free(self, slot: Slot) -> None: ...

    def read(self, slot: Slot) -> memoryview:
        """The slot's bytes: the memory itself where the daemon can address it, else a copy."""
        ...

    def writing(self, slot: Slot) -> AbstractContextManager[memoryview]:
        """Memory for the slot's bytes, which are in the slot at the end of the block."""
        ...

    def describe(self) -> ArenaDescriptor:
        """What a worker needs to map it."""
        ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class Slots:
    """The allocator that all arenas have."""

    def __init__(self, size_bytes: int, arena_id: int = 0) -> None:
        self.arena_id = arena_id
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self._pages = Extents(self.size_bytes // ALIGNMENT)
        self._generation = 0

    @property
    def used_bytes(self) -> int:
        return (self._pages.capacity - self._pages.free_units) * ALIGNMENT

    def allocate(self, size_bytes: int) -> Slot | None:
        page = self._pages.allocate(-(-size_bytes // ALIGNMENT))
        if page is None:
            return None
        self._generation += 1
        return Slot(self.arena_id, page * ALIGNMENT, size_bytes, self._generation)

    def free(self, slot: Slot) -> None:
        self._pages.free(slot.offset // ALIGNMENT)

    def check_integrity(self) -> None:
        self._pages.check_integrity()


class MemoryArena(Slots):
    """An arena in this process's own memory; the reference implementation, and what tests use."""

    def __init__(self, size_bytes: int, arena_id: int = 0, memory: memoryview | None = None) -> None:
        super().__init__(size_bytes, arena_id)
        self._memory = memory if memory is not None else memoryview(bytearray(self.size_bytes))

    def read(self, slot: Slot) -> memoryview:
        return self._memory[slot.offset : slot.offset + slot.size_bytes]

    @contextlib.contextmanager
    def writing(self, slot: Slot) -> Iterator[memoryview]:
        yield self.read(slot)

    def describe(self) -> ArenaDescriptor:
        return ArenaDescriptor(arena_id=self.arena_id, size_bytes=self.size_bytes)

    def close(self) -> None:
        self._memory.release()


class HostArena(MemoryArena):
    """An arena in a file of tmpfs. Raises ConfigurationError when the file system has no room for it."""

    def __init__(self, size_bytes: int, folder: Path, arena_id: int = 0) -> None:
        self._file = SharedFile(folder, "arena", size_bytes // ALIGNMENT * ALIGNMENT)
        super().__init__(size_bytes, arena_id, self._file.memory)

    def describe(self) -> ArenaDescriptor:
        described = super().describe()
        described.kind, described.path = ARENA_KIND_HOST_FILE, str(self._file.path)
        return described

    def close(self) -> None:
        self._file.close()
