"""Zero-copy transport: payloads in memory that the daemon shares with this process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from kvkernels import Payload

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.cuda_arena import CudaArena
from kvsidecar.kv_transfer.mapped_memory import map_arena, map_gpu_arena, map_staging
from kvsidecar.kv_transfer.transport import Fill


class SharedMemoryTransport:
    """The daemon's arenas for reading, the session's staging for writing."""

    zero_copy = True

    def __init__(self, welcome: pb.Welcome, gpu: int | None, warn: Callable[[str], None]) -> None:
        """Map the memory; ``gpu`` is the CUDA device that imports the GPU arena, if any.

        ``warn`` gets a sentence if the GPU arena cannot be imported; all payloads are in the arena, too. Raises OSError
        when the daemon refuses, and ValueError when this process cannot map the memory.
        """
        self._arena, self._staging = map_arena(welcome), memoryview(b"")
        self._gpu_arena: memoryview | CudaArena | None = None
        try:
            self._staging = map_staging(welcome)
            if welcome.HasField("gpu_arena"):
                self._gpu_arena = _imported(welcome, gpu, warn)
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
        if isinstance(self._gpu_arena, CudaArena):
            self._gpu_arena.close()
        self._arena = self._staging = memoryview(b"")
        self._gpu_arena = None

    def _payload(self, match: pb.ChunkMatch) -> Payload:
        """Return a chunk's payload, in GPU memory if it is there. Raises ValueError for an offset outside an arena."""
        arena: memoryview | CudaArena = self._arena
        offset, size = match.offset, match.payload_bytes
        if self._gpu_arena is not None and match.HasField("gpu_offset"):
            arena, offset = self._gpu_arena, match.gpu_offset
        if offset + size > len(arena):
            raise ValueError(f"a payload at {offset}+{size} is outside the arena")
        return arena.part(offset, size) if isinstance(arena, CudaArena) else arena[offset : offset + size]

    def _staged(self, place: pb.StagingRef) -> memoryview:
        """Return a reservation's staging memory.

        Raises ValueError for a reference outside of this session's memory.
        """
        end = place.offset + place.size_bytes
        if end > len(self._staging):
            raise ValueError(f"staging {place.offset}+{place.size_bytes} is outside of {len(self._staging)} bytes")
        return self._staging[place.offset : end]


def _imported(welcome: pb.Welcome, gpu: int | None, warn: Callable[[str], None]) -> memoryview | CudaArena | None:
    """Return the daemon's GPU arena; None if this process cannot read it."""
    try:
        if welcome.gpu_arena.kind == pb.ARENA_KIND_HOST:
            return map_gpu_arena(welcome)
        return None if gpu is None else CudaArena(welcome, gpu)
    except (OSError, ValueError) as error:
        warn(f"the daemon's GPU arena is not used, chunks come from host memory: {error}")
        return None
