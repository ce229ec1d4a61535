"""Maps a failed daemon call to its effect on the session.

No failed daemon call ever fails a request.
"""

from __future__ import annotations

import grpc

from kvsidecar.errors import from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session

# Refusals of one call that changed nothing: the session continues.
_REFUSED_CODES = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def ends_session(session: Session, error: Exception) -> bool:
    """Return True if a failure ends the session with its leases and reservations.

    A call that timed out keeps the session, but marks it as suspect: the daemon undoes such a call. A refused call
    (another tenant's salt, a limit) changed nothing, so the session continues. Any other failure ends the session.
    """
    if not isinstance(error, grpc.RpcError):
        return True
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        session.suspect()
        return False
    return error.code() not in _REFUSED_CODES


def handle_failure(connection: DaemonConnection, session: Session, error: Exception) -> str:
    """Drop the session if the failure ends it, and return the failure as a sentence; see ``ends_session``."""
    if ends_session(session, error):
        connection.drop(session)
    return failure_text(error)


def failure_text(error: Exception) -> str:
    """Return a failure as a sentence for the log."""
    return str(from_rpc(error) if isinstance(error, grpc.RpcError) else error) or type(error).__name__
