"""Maps a failed daemon call to its effect on the session.

No failed daemon call ever fails a request.
"""

from __future__ import annotations

import grpc

from kvsidecar.errors import from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session

REFUSED_CODES = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Refusals of one call that changed nothing: the session continues."""


def handle_failure(connection: DaemonConnection, session: Session, error: Exception) -> str:
    """Suspect, keep or end the session after a failure; return the failure as a sentence.

    A call that timed out keeps the session, but marks it as suspect: the daemon undoes such a call. A refused call
    (another tenant's salt, a limit) changed nothing, so the session continues. Any other failure ends the session with
    its leases and reservations.
    """
    if isinstance(error, grpc.RpcError):
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            session.suspect()
        elif error.code() not in REFUSED_CODES:
            connection.drop(session)
        return str(from_rpc(error))
    connection.drop(session)
    return str(error) or type(error).__name__
