"""Who is at the other end of a Unix socket, as the kernel says it (unix(7))."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class PeerCredentials:
    """The peer when it connected. A peer in a PID namespace that this process cannot see has pid 0."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected Unix socket. It says who connected; the descriptor may have gone to others since."""
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def is_allowed(peer: PeerCredentials, owner: int) -> bool:
    """Whether a peer is root or ``owner``."""
    return peer.uid in (0, owner)
