"""Maps the daemon's memory: arena and index summary for reading, staging for writing."""

from __future__ import annotations

import mmap
import os
import socket

from kvsidecar.cache.v1.cache_pb2 import ARENA_KIND_HOST, Welcome

_SOCKET_TIMEOUT_SECONDS = 2.0
ARENA, GPU_ARENA, STAGING, SUMMARY = b"a", b"g", b"s", b"i"
"""Requests on the memory socket; ``kvsidecar.cache.v1.Welcome.memory_socket`` is the specification."""


def map_arena(welcome: Welcome) -> memoryview:
    """Map the arena, read-only.

    Pages are mapped at first touch, so only used pages exist. Raises OSError when the daemon refuses, and ValueError
    for an arena that is not in host memory.
    """
    if welcome.arena.kind != ARENA_KIND_HOST:
        raise ValueError("the daemon offers no memory that this process can map")
    return _map(welcome, ARENA, welcome.arena.size_bytes, mmap.PROT_READ)


def map_gpu_arena(welcome: Welcome) -> memoryview:
    """Map a GPU arena that is host memory, as tests have it. Raises OSError when the daemon refuses."""
    return _map(welcome, GPU_ARENA, welcome.gpu_arena.size_bytes, mmap.PROT_READ)


def map_staging(welcome: Welcome) -> memoryview:
    """Map the session's staging memory for new chunks. Raises OSError when the daemon refuses."""
    return _map(welcome, STAGING, welcome.staging.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)


def map_summary(welcome: Welcome) -> memoryview:
    """Map the index summary, read-only. Raises OSError when the daemon refuses."""
    return _map(welcome, SUMMARY, welcome.summary.size_bytes, mmap.PROT_READ)


def _map(welcome: Welcome, which: bytes, size_bytes: int, access: int) -> memoryview:
    handle = receive_descriptor(welcome, which)
    try:
        return memoryview(mmap.mmap(handle, size_bytes, mmap.MAP_SHARED, access))
    finally:
        os.close(handle)


def receive_descriptor(welcome: Welcome, which: bytes) -> int:
    """Request a memory's file descriptor, which the caller closes.

    Raises OSError when the daemon sends none.
    """
    with _request_memory(welcome, which) as peer:
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise OSError(f"the daemon gave no memory at {welcome.memory_socket}: the session is not open")
    return descriptors[0]


def receive_handle(welcome: Welcome, size_bytes: int) -> bytes:
    """Request the GPU arena's IPC handle of ``size_bytes``.

    Raises OSError when the daemon sends none.
    """
    given = b""
    with _request_memory(welcome, GPU_ARENA) as peer:
        while len(given) < size_bytes and (more := peer.recv(size_bytes - len(given))):
            given += more
    if len(given) < size_bytes:
        raise OSError(f"the daemon gave no handle at {welcome.memory_socket}: the session is not open")
    return given


def _request_memory(welcome: Welcome, which: bytes) -> socket.socket:
    """Send a request for a memory; return its connection."""
    if not welcome.memory_socket:
        raise OSError("the daemon shares no memory with callers at this address")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_SOCKET_TIMEOUT_SECONDS)
        peer.connect(welcome.memory_socket)
        peer.sendall(welcome.session_id + which)
    except OSError:
        peer.close()
        raise
    return peer
