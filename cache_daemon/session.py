"""Sessions, leases and reservations: who holds what, and how it is given back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor

from cache_daemon.arena import Slot
from cache_daemon.chunk import Chunk

ID_BYTES = 16


@dataclass(eq=False, slots=True)
class Reservation:
    """A slot that a session writes; invisible until it commits."""

    header: ChunkHeader
    slot: Slot


@dataclass(eq=False, slots=True)
class Session:
    """What one attached worker holds. Ends with its stream."""

    name: str
    namespace: bytes
    descriptor: NamespaceDescriptor
    id: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    leases: dict[bytes, Chunk] = field(default_factory=dict)
    reservations: dict[bytes, Reservation] = field(default_factory=dict)
    skipped: tuple[int, int] = (0, 0)  # lookups that the worker knew to be in vain, and their tokens


def new_lease_id() -> bytes:
    """Opaque, and not to be guessed by another session."""
    return secrets.token_bytes(ID_BYTES)
