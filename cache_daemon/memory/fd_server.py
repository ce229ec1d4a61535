"""File descriptor server: sends the arenas, staging and index summary to open sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
from kvsidecar.errors import ConfigurationError
from kvsidecar.kv_transfer.mapped_memory import ARENA, GPU_ARENA, STAGING, SUMMARY
from kvsidecar.net.socket_watcher import SocketWatcher
from kvsidecar.process.background_task import BackgroundTask

ID_BYTES = 16
_REQUEST_TIMEOUT_SECONDS = 2.0
_MAX_CONNECTIONS = 32
_RETRY_SECONDS = 0.2

log = structlog.get_logger("cache_daemon")


class FdProvider(Protocol):
    """Memories of a session. Each method sends a descriptor to the peer.

    The methods raise OSError, or KeyError when there is no such session.
    """

    def arena(self, session_id: bytes, peer: socket.socket) -> None: ...

    def gpu_arena(self, session_id: bytes, peer: socket.socket) -> None: ...

    def staging(self, session_id: bytes, peer: socket.socket) -> None: ...

    def summary(self, session_id: bytes, peer: socket.socket) -> None: ...


@contextlib.asynccontextmanager
async def serve_fds(
    path: Path, provider: FdProvider, mode: int, is_allowed: Callable[[socket.socket], bool]
) -> AsyncIterator[None]:
    """Serve the socket ``path`` while the ``with`` block runs.

    A peer that ``is_allowed`` accepts sends the id of an open session and the name of a memory, and gets the memory's
    descriptor. If the socket file is deleted, it is created again. Raises ConfigurationError when it cannot be created.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def listen() -> None:
            listener = stack.enter_context(_listener(path, mode))
            await stack.enter_async_context(BackgroundTask(partial(_accept, provider, listener, is_allowed)))

        path.unlink(missing_ok=True)
        await listen()
        try:
            async with SocketWatcher(path, listen):
                yield
        finally:
            path.unlink(missing_ok=True)


def _listener(path: Path, mode: int) -> socket.socket:
    """Return a socket that listens at a path. Raises ConfigurationError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"no socket can be made at {path}: {error}; choose another --socket") from error
    finally:
        os.umask(before)
    listener.listen(_MAX_CONNECTIONS)
    listener.setblocking(False)
    return listener


async def _accept(provider: FdProvider, listener: socket.socket, is_allowed: Callable[[socket.socket], bool]) -> None:
    free = asyncio.Semaphore(_MAX_CONNECTIONS)
    async with asyncio.TaskGroup() as answers:  # a silent peer must not block other peers
        while True:
            await free.acquire()
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # possibly out of descriptors, which other connections will release
                free.release()
                log.warning("the memory socket could not accept, trying again", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            answers.create_task(_answer(provider, peer, is_allowed)).add_done_callback(lambda _: free.release())


async def _answer(provider: FdProvider, peer: socket.socket, is_allowed: Callable[[socket.socket], bool]) -> None:
    """Answer one peer. Never raises, since an error would end the server for all peers."""
    try:
        await _give(provider, peer, is_allowed)
    except Exception:
        log.exception("memory could not be given to a session")


async def _give(provider: FdProvider, peer: socket.socket, is_allowed: Callable[[socket.socket], bool]) -> None:
    loop, given = asyncio.get_running_loop(), b""
    with peer, contextlib.suppress(OSError, TimeoutError):
        if not is_allowed(peer):
            log.warning("a process of another user asked for memory and was refused")
            return
        peer.setblocking(False)
        async with asyncio.timeout(_REQUEST_TIMEOUT_SECONDS):
            while len(given) <= ID_BYTES and (more := await loop.sock_recv(peer, ID_BYTES + 1 - len(given))):
                given += more
        session_id, which = given[:ID_BYTES], given[ID_BYTES:]
        try:
            give = {
                ARENA: provider.arena,
                GPU_ARENA: provider.gpu_arena,
                STAGING: provider.staging,
                SUMMARY: provider.summary,
            }.get(which)
            if give is not None:
                give(session_id, peer)
        except (KeyError, ConfigurationError) as error:
            why = "there is no such session" if isinstance(error, KeyError) else str(error)
            log.warning("memory was asked for and refused", reason=why)
