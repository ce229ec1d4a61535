"""An arena in device memory: the same slots, leases and generations as the host arena; only the memory differs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import structlog
from kvsidecar.cache.v1.cache_pb2 import ArenaDescriptor
from kvsidecar.errors import ConfigurationError

from cache_daemon.arena import Slot, Slots
from cache_daemon.device_memory import DeviceMemory
from cache_daemon.session import ID_BYTES

_PATIENCE_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


class DeviceArena(Slots):
    """Owns its memory. ``handles`` is the socket at which sessions get its descriptor or handle."""

    def __init__(self, memory: DeviceMemory, handles: Path, arena_id: int = 0) -> None:
        super().__init__(memory.size_bytes, arena_id)
        self.memory, self.handles = memory, handles

    def read(self, slot: Slot) -> memoryview:
        return self.memory.read(slot.offset, slot.size_bytes)

    @contextlib.contextmanager
    def writing(self, slot: Slot) -> Iterator[memoryview]:
        staged = memoryview(bytearray(slot.size_bytes))
        yield staged
        self.memory.write(slot.offset, staged)

    def describe(self) -> ArenaDescriptor:
        memory = self.memory
        return ArenaDescriptor(
            arena_id=self.arena_id,
            kind=memory.kind,
            path=str(self.handles),
            size_bytes=self.size_bytes,
            device_uuid=memory.device_uuid,
        )

    def close(self) -> None:
        self.memory.close()


@contextlib.asynccontextmanager
async def handing_out(arena: DeviceArena, is_open: Callable[[bytes], bool]) -> AsyncIterator[None]:
    """Serves the arena's descriptor or handle at its socket meanwhile: who sends the id of an open session gets it.

    Raises ConfigurationError when the socket cannot be made.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        arena.handles.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(arena.handles))
        except OSError as error:
            raise ConfigurationError(
                f"no socket can be made at {arena.handles}: {error}; choose another --socket"
            ) from error
        finally:
            os.umask(before)
        listener.listen()
        listener.setblocking(False)
        task = asyncio.create_task(_accept(arena, listener, is_open))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            arena.handles.unlink(missing_ok=True)


async def _accept(arena: DeviceArena, listener: socket.socket, is_open: Callable[[bytes], bool]) -> None:
    async with asyncio.TaskGroup() as answers:  # one that says nothing keeps nobody waiting
        while True:
            peer, _ = await asyncio.get_running_loop().sock_accept(listener)
            answers.create_task(_answer(arena, peer, is_open))


async def _answer(arena: DeviceArena, peer: socket.socket, is_open: Callable[[bytes], bool]) -> None:
    loop, given = asyncio.get_running_loop(), b""
    with peer, contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while len(given) < ID_BYTES and (more := await loop.sock_recv(peer, ID_BYTES - len(given))):
                given += more
        if not is_open(given):
            log.warning("somebody without a session asked for the device arena and was refused")
            return
        arena.memory.hand_out(peer)
