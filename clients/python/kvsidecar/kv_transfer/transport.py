"""Interface of payload transports between the daemon and this process.

Matching, leases, reservations and commits do not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvkernels import Payload

from kvsidecar.cache.v1 import cache_pb2 as pb

Fill = Callable[[int, memoryview], None]
"""Writes the payload of the chunk with this index."""


# Assumed minimal bandwidth. A slower connection is useless, because computing is faster.
_MIN_LINK_BYTES_PER_SECOND = 8e6


def transfer_timeout(size_bytes: int, timeout: float) -> float:
    """Return the seconds that a transfer of ``size_bytes`` may take; an empty transfer may take ``timeout``."""
    return timeout + size_bytes / _MIN_LINK_BYTES_PER_SECOND


class Transport(Protocol):
    """Payload transport of one session. Thread-safe."""

    zero_copy: bool
    """True if payloads are read in place. Then all payloads of a lease stay valid until its release.

    If False, a payload is valid until the next payload is requested.
    """
    max_reserved_bytes: int
    """Maximal bytes that may be reserved at one time."""

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        """Yield the payloads of leased chunks, in order, complete and as committed.

        ``timeout`` (seconds) limits all payloads together. Close the iterator to stop early. Raises ConnectionError,
        grpc.RpcError, and ValueError for an invalid payload.
        """
        ...

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        """Fill the payloads of granted reservations, and transfer them to the daemon's staging.

        ``granted`` has each reservation with the index of its chunk; ``fill`` runs on the calling thread. Raises the
        exceptions of ``fill``, ValueError, ConnectionError, grpc.RpcError.
        """
        ...

    def close(self) -> None:
        """Release the memory; views in use keep it mapped. Idempotent."""
        ...


class NoTransport:
    """Transport of sessions that only look up and lease."""

    zero_copy, max_reserved_bytes = True, 0

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        raise ValueError("this session reads no chunks")

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        raise ValueError("this session writes no chunks")

    def close(self) -> None:
        pass
