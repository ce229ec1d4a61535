"""Sessions of attached workers, with the leases and reservations that end with them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import NamespaceMismatch, UnknownLease, UnknownSession

from cache_daemon.memory.arena import Slot, footprint
from cache_daemon.memory.fd_server import ID_BYTES
from cache_daemon.memory.staging_memory import StagingBudget, StagingMemory
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.counters import Counters
from cache_daemon.store.lease_pin_limits import LeasePinLimit, LeasePinLimits
from cache_daemon.store.leases import LEASE_SECONDS, LeaseGuard, expire
from cache_daemon.store.prompt_hints import ChunkHints
from cache_daemon.store.tenant_accounts import TenantAccount

_Handle = TypeVar("_Handle")
# Shares of the arena that sessions without shared memory may lease: all together, and those of one caller.
_EXTERNAL_SHARE, _CALLER_SHARE = 0.5, 0.25


@dataclass(eq=False, slots=True)
class Reservation:
    """Staging memory for a chunk that is not visible yet."""

    header: ChunkHeader  # without its token_ids: those are ``ids``
    ids: bytes
    tenant: TenantAccount
    staged: Slot
    hints: ChunkHints
    reserved_at: float = field(default_factory=time.monotonic)
    invalidated: bool = False  # a deletion since the reservation includes this chunk


def rename_handle(handles: dict[bytes, _Handle], generated: bytes, name: bytes) -> bytes:
    """Rename a lease or reservation to the client's ``name``. Returns its name.

    The lease or reservation keeps its generated name if ``name`` is empty or taken.
    """
    if not generated or not name or name in handles:
        return generated
    handles[name] = handles.pop(generated)
    return name


@dataclass(eq=False)
class Session:
    """Leases, reservations and staging of one attached worker; all end with its Attach stream."""

    name: str
    namespace: bytes
    descriptor: NamespaceDescriptor
    staging: StagingMemory | None  # None once the session has ended
    shares_memory: bool = True  # the caller maps arena and staging; otherwise bytes are streamed
    reads_gpu: bool = False  # the caller imported the GPU arena
    id: bytes = field(default_factory=lambda: secrets.token_bytes(ID_BYTES))
    opened_at: float = field(default_factory=lambda: time.monotonic())
    leases: dict[bytes, LeaseGuard] = field(default_factory=dict)
    reservations: dict[bytes, Reservation] = field(default_factory=dict)
    committing: int = 0  # number of commits that are copying from staging
    closed: bool = False
    heartbeat_totals: tuple[int, ...] = ()  # totals of its last heartbeat
    owner: object = None  # the principal that opened it
    usage: LeasePinLimit | None = None  # lease usage of the owner; None if the session shares memory

    def __post_init__(self) -> None:
        self.geometry = Geometry.of(self.descriptor)

    def add_lease(self, lease: LeaseGuard) -> bytes:
        """Add a lease to the session. Returns its id, which other sessions cannot guess."""
        lease_id = secrets.token_bytes(ID_BYTES)
        self.leases[lease_id] = lease
        return lease_id

    def leased_chunks(self, lease_id: bytes, prefix_hashes: Sequence[bytes]) -> list[Chunk]:
        """Return chunks of a lease by their prefix hashes. Raises UnknownLease."""
        lease = self.leases.get(lease_id)
        there = {} if lease is None else {chunk.key: chunk for chunk in lease.chunks}
        found = [there[key] for key in prefix_hashes if key in there]
        if len(found) < len(prefix_hashes):
            raise UnknownLease("the lease has ended, or holds no such chunk; match the prompt again")
        return found

    def record_heartbeat(self, totals: tuple[int, ...], counters: Counters) -> None:
        """Add the growth since the last heartbeat to ``counters``; totals never fall.

        Totals of sessions without shared memory are not trusted.
        """
        if self.shares_memory:
            counters.add_heartbeat(self.heartbeat_totals, totals)
        self.heartbeat_totals = totals

    def close_staging(self) -> None:
        """Free the staging memory of an ended session once no copy runs."""
        if self.closed and not self.committing and self.staging is not None:
            self.staging.close()
            self.staging = None


class SessionTable:
    """The open sessions, by id.

    ``staging_bytes`` is the size of the staging memory of each session. Sessions without shared memory lease only a
    share of the arena.
    """

    def __init__(self, staging_bytes: int, arena_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._leased = LeasePinLimits(
            int(arena_bytes * _EXTERNAL_SHARE), int(arena_bytes * _CALLER_SHARE), lambda c: footprint(c.size_bytes)
        )
        self._open: dict[bytes, Session] = {}
        self._allowances: WeakValueDictionary[object, StagingBudget] = WeakValueDictionary()

    def open(
        self,
        name: str,
        descriptor: NamespaceDescriptor,
        namespace: bytes,
        *,
        shares_memory: bool = True,
        owner: object = None,
        listed: bool = True,
    ) -> Session:
        """Open a session of ``owner``. Raises NamespaceMismatch.

        ``listed`` is False for a session that the daemon itself opens for the duration of one call.
        """
        expected = keys.namespace_id(descriptor)
        if namespace != expected:
            raise NamespaceMismatch(
                f"the namespace id {namespace.hex()[:64] or '(empty)'} does not belong to the descriptor sent "
                f"(its id is {expected.hex()}); worker and daemon must be of the same version"
            )
        if descriptor.format_version != keys.FORMAT_VERSION:
            raise NamespaceMismatch(
                f"format_version is {descriptor.format_version}; this daemon stores {keys.FORMAT_VERSION}"
            )
        allowed = None if shares_memory else self._allowance(owner)
        staging = StagingMemory(self._staging_bytes, allowed)
        usage = None if shares_memory else self.leased_by(owner)
        session = Session(name, namespace, descriptor, staging, shares_memory, owner=owner, usage=usage)
        if listed:
            self._open[session.id] = session
        return session

    def leased_by(self, owner: Hashable) -> LeasePinLimit:
        """Return the lease usage of an external caller; keep the result while the caller leases chunks."""
        return self._leased.of(owner)

    def _allowance(self, owner: object) -> StagingBudget:
        """Return the staging budget that an owner's sessions without shared memory share."""
        found = self._allowances.get(owner)
        if found is None:
            found = self._allowances[owner] = StagingBudget(self._staging_bytes)
        return found

    def expire_leases(self, older_than_seconds: float = LEASE_SECONDS) -> None:
        """Release old leases of sessions that do not map the arena.

        Without this, a remote caller that never releases its leases could keep the arena full. Releasing them is safe:
        such a session cannot read the arena, and calls that stream chunks lease them themselves.
        """
        for session in self:
            if not session.shares_memory:
                expire(session.leases, older_than_seconds)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)

    def find(self, session_id: bytes) -> Session | None:
        return self._open.get(session_id)

    def get(self, session_id: bytes) -> Session:
        """Return a session by id. Raises UnknownSession."""
        found = self._open.get(session_id)
        if found is None:
            raise UnknownSession(
                "the session has ended or never was; call Attach and use the session_id of its Welcome"
            )
        return found

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        """Raise AssertionError unless leases and staging add up."""
        leased: Counter[int] = Counter(id(c) for s in self for guard in s.leases.values() for c in guard.chunks)
        # Running calls lease chunks, too.
        assert all(c.leases >= leased[id(c)] for c in chunks), "a lease on a chunk that is not kept"
        for session in self:
            staged = sum(footprint(r.staged.size_bytes) for r in session.reservations.values())
            used = session.staging.used_bytes if session.staging is not None else 0
            assert session.committing or staged == used, "staging and reservations differ"
