"""Leases: a leased chunk is neither moved nor freed until its release or expiry."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence

from cache_daemon.store.chunk import Chunk
from cache_daemon.store.lease_pin_limits import LeasePinLimit

# Time after which leases of sessions without shared memory expire.
LEASE_SECONDS = 60.0


class LeaseGuard:
    """Lease of chunks, whose slots are neither moved, reused nor freed until ``release``.

    ``on_released`` is called with every chunk whose last lease ended. ``usage`` counts the leased chunks of an external
    caller.
    """

    def __init__(
        self, chunks: Sequence[Chunk], on_released: Callable[[Chunk], None], usage: LeasePinLimit | None = None
    ) -> None:
        self.chunks: list[Chunk] = []
        self.acquired_at = time.monotonic()
        self._on_released, self._usage = on_released, usage
        self.add(chunks)

    def __enter__(self) -> LeaseGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Lease more chunks."""
        for chunk in chunks:
            chunk.leases += 1
            if self._usage is not None:
                self._usage.add(chunk)
        self.chunks.extend(chunks)

    def retain_only(self, wanted: Sequence[Chunk]) -> None:
        """Release all chunks except ``wanted``, which must be leased chunks."""
        if len(wanted) == len(self.chunks):
            return
        kept = set(map(id, wanted))
        released = [c for c in self.chunks if id(c) not in kept]
        self.chunks = [c for c in self.chunks if id(c) in kept]
        self._release(released)

    def release(self) -> None:
        """Release all chunks. Idempotent."""
        chunks, self.chunks = self.chunks, []
        self._release(chunks)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.leases -= 1
            if self._usage is not None:
                self._usage.add(chunk, -1)
            if not chunk.leases:
                self._on_released(chunk)


def expire(leases: MutableMapping[bytes, LeaseGuard], older_than_seconds: float = LEASE_SECONDS) -> None:
    """Release and remove the leases that are older than ``older_than_seconds``."""
    before = time.monotonic() - older_than_seconds
    for lease_id in [key for key, lease in leases.items() if lease.acquired_at < before]:
        leases.pop(lease_id).release()
