"""Base of the servicers: shared state and authorization of requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import Context, PermissionDenied

from cache_daemon.auth.principal import Principal
from cache_daemon.observability.call_metrics import CallMetrics
from cache_daemon.observability.reuse_metrics import ReuseMetrics
from cache_daemon.prefork_supervisor import RestartCounts
from cache_daemon.rpc import request_validation
from cache_daemon.rpc.caller_budgets import CallerLimits, LargeRequests, OpenStreams
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.sessions import Session


@dataclass(eq=False)
class ServiceState:
    """State shared by all listeners of a daemon."""

    store: ChunkStore
    heartbeat_ms: int
    calls: CallMetrics = field(default_factory=CallMetrics)
    stall_ms: Callable[[], float] = lambda: 0.0
    on_lookup: Callable[[bytes, bytes], None] | None = None  # gets root and ids of every prompt that is looked up
    reuse: ReuseMetrics = field(default_factory=ReuseMetrics)
    restarts: RestartCounts = field(default_factory=RestartCounts)
    open_streams: OpenStreams = field(default_factory=OpenStreams)
    large_requests: LargeRequests = field(default_factory=LargeRequests)

    def stats(self) -> pb.StatsResponse:
        """Return the statistics of the store, the event loop and the limits.

        Runs on the event loop.
        """
        stats = self.store.stats()
        stats.loop_stall_ms, stats.refused = self.stall_ms(), self.calls.refused
        stats.restarts, stats.oom_kills = self.restarts.restarts, self.restarts.oom_kills
        return stats


class ServicerBase:
    """Base class of the servicers.

    ``memory_socket`` is empty on listeners whose callers share no memory.
    """

    def __init__(self, shared: ServiceState, principal_of: Callable[[Context], Principal], memory_socket: str) -> None:
        self.shared, self.store, self.calls = shared, shared.store, shared.calls
        self.sessions, self.verdicts, self.events = shared.store.sessions, shared.store.verdicts, shared.store.events
        self.principal_of, self.memory_socket = principal_of, memory_socket

    def salt(self, context: Context, salt: bytes) -> bytes:
        """Return the request's salt if the caller may use it.

        Raises InvalidRequest, PermissionDenied.
        """
        self.principal_of(context).check_salt(request_validation.check_salt(salt))
        return salt

    def root(self, context: Context, namespace: bytes, salt: bytes) -> bytes:
        """Return the tenant root that a request names. Raises InvalidRequest, PermissionDenied."""
        return keys.tenant_root(request_validation.check_hash("namespace", namespace), self.salt(context, salt))

    def session(self, context: Context, session_id: bytes) -> Session:
        """Return the caller's own session. Raises UnknownSession, PermissionDenied."""
        session = self.sessions.get(session_id)
        if session.owner != self.principal_of(context):
            raise PermissionDenied("the session is another caller's; call Attach and use the session_id of its Welcome")
        return session

    @property
    def private(self) -> bool:
        """True for the listener of the daemon's own user, whose callers share its memory."""
        return bool(self.memory_socket)

    def external_caller(self, context: Context) -> Principal | None:
        """Return the caller to which per-caller limits apply; None on the private socket."""
        return None if self.private else self.principal_of(context)

    def stream(self, context: Context, kind: str, share: CallerLimits) -> AbstractContextManager[None]:
        """Count a streaming call while the ``with`` block runs. Raises LimitExceeded."""
        return self.shared.open_streams.one(kind, share, self.external_caller(context))

    def large(self, context: Context, size_bytes: int) -> AbstractContextManager[None]:
        """Count a large request while the ``with`` block runs. Raises LimitExceeded."""
        if self.private:
            return nullcontext()
        return self.shared.large_requests.one(size_bytes, self.principal_of(context))
