"""How chunks' bytes get from the daemon into this process, and back.

What is matched, leased, reserved and committed, and by which rules, does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvkernels import Payload

from kvsidecar.cache.v1 import cache_pb2 as pb

Fill = Callable[[int, memoryview], None]
"""Writes the payload of the chunk with this number."""


# A link that is slower carries nothing in time.
_MIN_LINK_BYTES_PER_SECOND = 8e6


def transfer_timeout(size_bytes: int, timeout: float) -> float:
    """How long carrying so much may take; ``timeout`` is in seconds, for what moves nothing."""
    return timeout + size_bytes / _MIN_LINK_BYTES_PER_SECOND


class Transport(Protocol):
    """One session's. Any thread may use it."""

    zero_copy: bool
    """Whether payloads cost nothing to have: all of a lease's may be asked for before the first is used, and stay until
    the lease is released. Otherwise each is gone when the next is asked for."""
    max_reserved_bytes: int
    """What may be reserved at one time."""

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        """Payloads of leased chunks, in their order, whole and as they were committed. ``timeout`` is in seconds, for
        all of them. Close the iterator when it is not wanted to its end. Raises ValueError for what cannot be a
        payload, ConnectionError, grpc.RpcError."""
        ...

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        """Has the payloads of granted reservations filled, each with its number, on the calling thread, and brings them
        to where Commit copies from. Raises what ``fill`` raises, ValueError, ConnectionError, grpc.RpcError."""
        ...

    def close(self) -> None:
        """Lets go of its memory; views in use keep it until they are done. Idempotent."""
        ...


class NoTransport:
    """Of sessions that look up and lease, and carry nothing."""

    zero_copy, max_reserved_bytes = True, 0

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        raise ValueError("this session reads no chunks")

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        raise ValueError("this session writes no chunks")

    def close(self) -> None:
        pass
