"""Who is at the other end of a Unix socket, as the kernel says it (unix(7), pidfd_open(2))."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from array import array
from dataclasses import dataclass

_SO_PEERGROUPS, _SO_PEERPIDFD = 59, 77  # <asm-generic/socket.h>; Linux 4.13 and 6.5
_UCRED = struct.Struct("3i")
_LONGEST_OPTION = 1024  # that Python reads


@dataclass(frozen=True)
class PeerCredentials:
    """The peer when it connected. A peer in a PID namespace that this process cannot see has pid 0."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected Unix socket. It says who connected; the descriptor may have gone to others since."""
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def peer_groups(connection: socket.socket) -> frozenset[int]:
    """All groups of the peer. One that is in more than 256 counts with its first alone."""
    first = peer_credentials(connection).gid
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _LONGEST_OPTION)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return frozenset([first])
    return frozenset([first, *array("I", packed)])


def is_allowed(
    peer: PeerCredentials, owner: int, group: int | None = None, groups: frozenset[int] = frozenset()
) -> bool:
    """Whether a peer is root, ``owner``, or, where ``group`` is given, a member of it by ``groups`` or its first."""
    return peer.uid in (0, owner) or (group is not None and (peer.gid == group or group in groups))


def open_pidfd(pid: int) -> int:
    """A descriptor of a process, the caller's to close. Raises ProcessLookupError when there is none (any more)."""
    if pid <= 0:
        raise ProcessLookupError(f"process {pid} cannot be seen from here; it is in another PID namespace")
    return os.pidfd_open(pid)


def peer_pidfd(connection: socket.socket) -> int:
    """A descriptor of the very process that connected, the caller's to close.

    Before Linux 6.5 it is found by its number, which another process may have by then when the peer died at once.
    Raises ProcessLookupError when the peer is gone.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel, or a peer that is gone: asking by number tells them apart
        return open_pidfd(peer_credentials(connection).pid)


def has_ended(pidfd: int) -> bool:
    """Whether the process has ended, with all its threads and mappings. Never blocks."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
