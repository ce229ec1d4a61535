"""What a failure with the daemon means for the session: nothing of it ever fails a request."""

from __future__ import annotations

import grpc

from kvsidecar.errors import from_rpc
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.session import Session

REFUSED_CODES = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Said of one call, which changed nothing: other requests of the session are none the worse."""


def handle_failure(connection: DaemonConnection, session: Session, error: Exception) -> str:
    """Does with the session what a failure asks for, and says the failure in a sentence.

    A call that was not answered in time is undone by the daemon, and one that was refused (a salt that the daemon lets
    others use, too much at one time) changed nothing; any other failure ends the session, and with it all that it held.
    """
    if isinstance(error, grpc.RpcError):
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            session.suspect()
        elif error.code() not in REFUSED_CODES:
            connection.drop(session)
        return str(from_rpc(error))
    connection.drop(session)
    return str(error) or type(error).__name__
