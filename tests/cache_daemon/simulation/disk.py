"""State that outlives a simulated daemon's process: disk and arena."""

from __future__ import annotations

from collections.abc import Sequence

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.durable_tier import Loaded, PutResult, ReadJob, ReadResult, TierFailed, WriteGroup
from cache_daemon.memory.arena import MemoryArena, Slot
from cache_daemon.memory.device_memory import HostMemory
from cache_daemon.memory.gpu_arena import GpuArena
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.simulation.thread import Hub


class Disk(MemoryTier):
    """Contents of a disk, which survive a crash. A crash between write and sync undoes a transaction."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        self._synced = ({}, {})  # type: tuple[dict[bytes, object], dict[bytes, bytes]]

    def load(self) -> list[Loaded]:
        """Load the chunks. Each load creates new header objects, as a load from a real disk does."""
        return [Loaded(ChunkHeader.FromString(found[0].SerializeToString()), *found[1:]) for found in super().load()]

    def crash(self) -> None:
        """Drop all changes that were not synced."""
        self._stored, self._notes = dict(self._synced[0]), dict(self._synced[1])  # type: ignore[arg-type]

    def sync(self) -> None:
        """Make applied changes survive a crash."""
        self._synced = (dict(self._stored), dict(self._notes))

    @property
    def contents(self) -> set[bytes]:
        """Prefix hashes of all chunks."""
        return set(self._stored)


class Drive:
    """A daemon's access to a disk from start to end. Calls take time; ``cut`` ends the access at a crash."""

    def __init__(self, disk: Disk, hub: Hub) -> None:
        self.disk, self._hub = disk, hub
        self.is_cut = False
        self.load_report = disk.load_report

    def cut(self) -> None:
        self.is_cut = True
        self.disk.crash()

    def _take_time(self) -> None:
        self._hub.pause()
        if self.is_cut:
            raise TierFailed("the daemon is dead")

    def load(self) -> list[Loaded]:
        self._take_time()
        return self.disk.load()

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        self._hub.pause()
        if self.is_cut:
            return [ReadResult.FAILED] * len(jobs)
        done = self.disk.read(jobs)
        self._hub.pause()
        return done

    def apply(self, group: WriteGroup) -> list[PutResult]:
        self._take_time()
        done = self.disk.apply(group)
        self._take_time()
        self.disk.sync()
        self._hub.pause()  # the transaction is on disk, but the daemon does not know it yet
        return done

    def notes(self) -> dict[bytes, bytes]:
        return self.disk.notes()

    def usage(self):  # type: ignore[no-untyped-def]
        return self.disk.usage()

    def compact(self) -> None:
        """Do nothing: there is no file to shrink."""

    def close(self) -> None:
        """Do nothing: there is no file to close."""


class SimulatedArena(MemoryArena):
    """An arena whose copies and reads let other work run in between."""

    def __init__(self, size_bytes: int, hub: Hub) -> None:
        super().__init__(size_bytes)
        self._hub = hub

    def write(self, slot: Slot, data: memoryview) -> None:
        half = len(data) // 2
        target = super().read(slot)
        self._hub.pause()
        target[:half] = data[:half]
        self._hub.pause()
        target[half:] = data[half:]
        self._hub.pause()


class SimulatedGpuArena(GpuArena):
    """A GPU arena whose copies let other work run in between."""

    def __init__(self, size_bytes: int, hub: Hub) -> None:
        super().__init__(HostMemory(size_bytes))
        self._hub = hub

    def write(self, slot: Slot, data: memoryview) -> None:
        half = len(data) // 2
        self._hub.pause()
        self.memory.write(slot.offset, data[:half])
        self._hub.pause()
        self.memory.write(slot.offset + half, data[half:])
        self._hub.pause()
