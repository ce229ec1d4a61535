"""What the methods of the service share: the store, and who calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvsidecar import keys
from kvsidecar.errors import Context, PermissionDenied

from cache_daemon.access.principal import Principal
from cache_daemon.rpc import limits
from cache_daemon.rpc.calls import Calls
from cache_daemon.store.facade import ChunkStore
from cache_daemon.store.sessions import Session


@dataclass(eq=False)
class Shared:
    """One for all doors of a daemon."""

    store: ChunkStore
    heartbeat_ms: int
    calls: Calls = field(default_factory=Calls)
    stall_ms: Callable[[], float] = lambda: 0.0
    asked: Callable[[bytes, bytes], None] | None = None  # hears the root and ids of every prompt looked up
    open_streams: Counter[str] = field(default_factory=Counter)


class AtDoor:
    """Base of the service's parts. ``memory_socket`` is empty at doors whose callers share no memory."""

    def __init__(self, shared: Shared, principal_of: Callable[[Context], Principal], memory_socket: str) -> None:
        self.shared, self.store, self.calls = shared, shared.store, shared.calls
        self.principal_of, self.memory_socket = principal_of, memory_socket

    def salt(self, context: Context, salt: bytes) -> bytes:
        """The request's salt, which the caller may use. Raises InvalidRequest, PermissionDenied."""
        self.principal_of(context).check_salt(limits.salt_of(salt))
        return salt

    def root(self, context: Context, namespace: bytes, salt: bytes) -> bytes:
        """The tenant root that a request names. Raises InvalidRequest, PermissionDenied."""
        return keys.tenant_root(limits.hash_of("namespace", namespace), self.salt(context, salt))

    def session(self, context: Context, session_id: bytes) -> Session:
        """The caller's own session. Raises UnknownSession, PermissionDenied."""
        session = self.store.sessions.get(session_id)
        if session.owner != self.principal_of(context):
            raise PermissionDenied("the session is another caller's; call Attach and use the session_id of its Welcome")
        return session

    @contextmanager
    def stream(self, kind: str, most: int) -> Iterator[None]:
        """Counts a long call while it lasts. Raises LimitExceeded."""
        limits.room_for(f"open {kind} calls", self.shared.open_streams[kind], most)
        self.shared.open_streams[kind] += 1
        try:
            yield
        finally:
            self.shared.open_streams[kind] -= 1
