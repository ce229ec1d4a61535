"""Remote backend that several daemons share over a network with delays and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cache_daemon.remote.backend import Item, RemoteFailed
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend


class Network:
    """Faults of a daemon's network: the next ``failing`` answers are lost; with ``is_away``, no call arrives."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds, self.failing = seconds, 0
        self.is_away = False


class Connection:
    """One daemon's client of the backend."""

    name, lanes = "simulated", 1

    def __init__(self, engine: InMemoryBackend, network: Network) -> None:
        self._engine, self._network = engine, network
        self.part_bytes = engine.part_bytes
        self.is_cut = False

    def cut(self) -> None:
        """Drop all further requests, because the daemon is dead."""
        self.is_cut = True

    async def _there(self) -> None:
        if self.is_cut:
            raise RemoteFailed("the daemon is dead")
        await asyncio.sleep(self._network.seconds)
        if self.is_cut or self._network.is_away:
            raise RemoteFailed("the engine is away")

    async def _back(self) -> None:
        await asyncio.sleep(self._network.seconds)
        if self._network.failing:
            self._network.failing -= 1
            raise RemoteFailed("the answer is lost")

    async def connect(self) -> None:
        await self._there()

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        await self._there()
        found = await self._engine.get_many(names, lane, max_bytes)
        await self._back()
        return found

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        await self._there()
        for item in items:  # one by one, because the contract allows that
            await self._engine.put_many([item], ttl_seconds)
            await asyncio.sleep(0)
            if self.is_cut:
                raise RemoteFailed("the daemon is dead")
        await self._back()

    async def put_if_absent(self, name: str, value: bytes) -> None:
        await self._there()
        await self._engine.put_if_absent(name, value)
        await self._back()

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._there()
        await self._engine.delete_many(names)
        await self._back()

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        await self._there()
        async for page in self._engine.scan(prefix):
            yield page
        await self._back()

    async def close(self) -> None:
        """Do nothing: there is no connection to close."""
