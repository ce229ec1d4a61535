"""Zero-copy transport: payloads in memory that the daemon shares with this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvkernels import Payload

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.cuda_arena import CudaArena
from kvsidecar.kv_transfer.mapped_memory import map_arena, map_staging
from kvsidecar.kv_transfer.transport import Fill


class SharedMemoryTransport:
    """The daemon's arena for reading, the session's staging for writing."""

    zero_copy = True

    def __init__(self, welcome: pb.Welcome, gpu: int | None = None) -> None:
        """Map the memory; ``gpu`` is the CUDA device that imports an arena in device memory, if any.

        Raises OSError when the daemon refuses, and ValueError when this process cannot map the memory.
        """
        self._arena: memoryview | CudaArena
        if welcome.arena.kind in (pb.ARENA_KIND_CUDA, pb.ARENA_KIND_CUDA_IPC) and gpu is not None:
            self._arena = CudaArena(welcome, gpu)
        else:
            self._arena = map_arena(welcome)
        self._staging = memoryview(b"")
        try:
            self._staging = map_staging(welcome)
        except BaseException:
            self.close()
            raise
        self.max_reserved_bytes = len(self._staging)

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        for match in matches:
            yield self._payload(match)

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        items = []
        for i, reservation in granted:
            payload = self._staged(reservation.staging)
            fill(i, payload)
            items.append(pb.CommitItem(reservation_id=reservation.reservation_id, checksum=keys.checksum(payload)))
        return items

    def close(self) -> None:
        if isinstance(self._arena, CudaArena):
            self._arena.close()
        self._arena = self._staging = memoryview(b"")

    def _payload(self, match: pb.ChunkMatch) -> Payload:
        """Return a chunk's payload. Raises ValueError for an offset outside the arena."""
        end = match.offset + match.payload_bytes
        if end > len(self._arena):
            raise ValueError(f"a payload at {match.offset}+{match.payload_bytes} is outside the arena")
        if isinstance(self._arena, CudaArena):
            return self._arena.part(match.offset, match.payload_bytes)
        return self._arena[match.offset : end]

    def _staged(self, place: pb.StagingRef) -> memoryview:
        """Return a reservation's staging memory.

        Raises ValueError for a reference outside of this session's memory.
        """
        end = place.offset + place.size_bytes
        if end > len(self._staging):
            raise ValueError(f"staging {place.offset}+{place.size_bytes} is outside of {len(self._staging)} bytes")
        return self._staging[place.offset : end]
