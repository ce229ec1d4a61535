"""Sessions: who holds what, and the one way in which it is given back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import UnknownLease, UnknownSession

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.memory.fd_server import ID_BYTES
from cache_daemon.memory.staging import Staging, StagingBudget
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.tenant_usage import TenantAccount

_Handle = TypeVar("_Handle")
# Where no memory is shared.
LEASE_SECONDS = 60.0


class LeaseGuard:
    """Keeps chunks' slots from being moved, reused or freed until it is given back, which may happen more than once.

    ``unused`` is told of every chunk that the last holder let go of.
    """

    def __init__(self, chunks: Sequence[Chunk], on_released: Callable[[Chunk], None]) -> None:
        self.chunks: list[Chunk] = []
        self.acquired_at = time.monotonic()
        self._on_released = on_released
        self.add(chunks)

    def __enter__(self) -> LeaseGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Keeps these, too."""
        for chunk in chunks:
            chunk.leases += 1
        self.chunks.extend(chunks)

    def retain_only(self, wanted: Sequence[Chunk]) -> None:
        """Gives back all but these, which are among its chunks."""
        if len(wanted) == len(self.chunks):
            return
        kept = set(map(id, wanted))
        gone = [c for c in self.chunks if id(c) not in kept]
        self.chunks = [c for c in self.chunks if id(c) in kept]
        self._release(gone)

    def release(self) -> None:
        chunks, self.chunks = self.chunks, []
        self._release(chunks)

    def _release(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.leases -= 1
            if not chunk.leases:
                self._on_released(chunk)


@dataclass(eq=False, slots=True)
class Reservation:
    """Room in staging for a chunk that is not visible yet."""

    header: ChunkHeader  # without its token_ids: those are ``ids``
    ids: bytes
    tenant: TenantAccount
    staged: Slot
    expires_at: float  # on the store's clock
    reserved_at: float = field(default_factory=time.monotonic)
    invalidated: bool = False  # what it belongs to was deleted since


def rename_handle(held: dict[bytes, _Handle], given: bytes, name: bytes) -> bytes:
    """Calls what is held what its holder wants, unless that is nothing or something else's name; returns its name."""
    if not given or not name or name in held:
        return given
    held[name] = held.pop(given)
    return name


@dataclass(eq=False)
class Session:
    """What one attached worker holds. Ends with its stream."""

    name: str
    namespace: bytes
    descriptor: NamespaceDescriptor
    staging: Staging | None  # None once the session has ended
    shares_memory: bool = True  # its caller maps the arena and its staging; if not, it is sent and sends bytes
    id: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    opened_at: float = field(default_factory=lambda: time.monotonic())
    leases: dict[bytes, LeaseGuard] = field(default_factory=dict)
    reservations: dict[bytes, Reservation] = field(default_factory=dict)
    committing: int = 0  # commits that copy from staging now
    closed: bool = False
    heartbeat_totals: tuple[int, ...] = ()  # the totals of its last heartbeat
    owner: object = None  # who opened it

    def __post_init__(self) -> None:
        self.geometry = Geometry.of(self.descriptor)

    def add_lease(self, hold: LeaseGuard) -> bytes:
        """Makes a hold the session's. Returns the lease's id, opaque and not to be guessed by another session."""
        lease_id = secrets.token_bytes(ID_BYTES)
        self.leases[lease_id] = hold
        return lease_id

    def leased_chunks(self, lease_id: bytes, prefix_hashes: Sequence[bytes]) -> list[Chunk]:
        """Chunks that a lease holds, by their names. Raises UnknownLease."""
        hold = self.leases.get(lease_id)
        there = {} if hold is None else {chunk.key: chunk for chunk in hold.chunks}
        found = [there[key] for key in prefix_hashes if key in there]
        if len(found) < len(prefix_hashes):
            raise UnknownLease("the lease has ended, or holds no such chunk; match the prompt again")
        return found

    def close_staging(self) -> None:
        """Gives the staging memory up once the session has ended and nothing is copied from it."""
        if self.closed and not self.committing and self.staging is not None:
            self.staging.close()
            self.staging = None


class SessionTable:
    """The open ones."""

    def __init__(self) -> None:
        self._open: dict[bytes, Session] = {}
        self._allowances: WeakValueDictionary[object, StagingBudget] = WeakValueDictionary()

    def allowance(self, owner: object, size_bytes: int) -> StagingBudget:
        """What an owner's sessions that share no memory may reserve together. Kept while one of them has it."""
        found = self._allowances.get(owner)
        if found is None:
            found = self._allowances[owner] = StagingBudget(size_bytes)
        return found

    def expire_leases(self, older_than_seconds: float = LEASE_SECONDS) -> None:
        """Gives back what sessions that share no memory have leased for longer: nobody reads by it, but for calls that
        hold what they send, and those who forget leases, or mean to, are not this machine's user."""
        before = time.monotonic() - older_than_seconds
        for session in self:
            if not session.shares_memory:
                for lease_id in [key for key, hold in session.leases.items() if hold.acquired_at < before]:
                    session.leases.pop(lease_id).release()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def add(self, session: Session) -> None:
        self._open[session.id] = session

    def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)

    def find(self, session_id: bytes) -> Session | None:
        return self._open.get(session_id)

    def get(self, session_id: bytes) -> Session:
        """Raises UnknownSession."""
        found = self._open.get(session_id)
        if found is None:
            raise UnknownSession(
                "the session has ended or never was; call Attach and use the session_id of its Welcome"
            )
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError unless each session's staging is what it has reserved."""
        for session in self:
            staged = sum(footprint(r.staged.size_bytes) for r in session.reservations.values())
            used = session.staging.used_bytes if session.staging is not None else 0
            assert session.committing or staged == used, "staging and reservations differ"
