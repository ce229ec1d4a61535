"""Maps the daemon's memory into this process, whatever kind of host memory it is."""

from __future__ import annotations

import mmap
import os
import socket

from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_HOST_DESCRIPTOR, ARENA_KIND_HOST_FILE, ArenaDescriptor

_PATIENCE_SECONDS = 2.0


def map_arena(described: ArenaDescriptor, session_id: bytes) -> memoryview:
    """The arena's bytes, shared with the daemon. Raises OSError when it cannot be opened, ValueError for memory that is
    not the host's."""
    if described.kind == ARENA_KIND_HOST_FILE:
        handle = os.open(described.path, os.O_RDWR | os.O_CLOEXEC)
    elif described.kind == ARENA_KIND_HOST_DESCRIPTOR:
        handle = receive_descriptor(described.path, session_id)
    else:
        raise ValueError("the daemon offers no memory that this process can map")
    try:
        # Populated: a first touch during a request would cost a page fault per 4 KiB.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return memoryview(mmap.mmap(handle, described.size_bytes, flags=flags))
    finally:
        os.close(handle)


def receive_descriptor(path: str, session_id: bytes) -> int:
    """Asks the daemon for its device memory's descriptor; the caller closes it. Raises OSError when it gives none."""
    with _asking(path, session_id) as peer:
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise OSError(f"the daemon gave no descriptor at {path}: the session is not open")
    return descriptors[0]


def receive_handle(path: str, session_id: bytes, size_bytes: int) -> bytes:
    """Asks the daemon for its device memory's handle of so many bytes. Raises OSError when it gives none."""
    given = b""
    with _asking(path, session_id) as peer:
        while len(given) < size_bytes and (more := peer.recv(size_bytes - len(given))):
            given += more
    if len(given) < size_bytes:
        raise OSError(f"the daemon gave no handle at {path}: the session is not open")
    return given


def _asking(path: str, session_id: bytes) -> socket.socket:
    """A connection on which the question has been put."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_PATIENCE_SECONDS)
        peer.connect(path)
        peer.sendall(session_id)
    except OSError:
        peer.close()
        raise
    return peer
