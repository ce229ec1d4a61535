"""Reference remote backend: a dictionary that fulfils the whole contract of a backend."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from cache_daemon.remote.backend import Item, limited, value_limits


class InMemoryBackend:
    """A ``RemoteEngine`` in memory. Tiers that share one behave like nodes that share a server."""

    name = "memory"
    lanes = 1

    def __init__(self, part_bytes: int = 1 << 20, clock: Callable[[], float] = time.monotonic) -> None:
        self.part_bytes, self._clock = part_bytes, clock
        self.values: dict[str, tuple[bytes, float | None]] = {}  # and when they end

    async def connect(self) -> None:
        """Do nothing: there is no server."""

    async def get_many(self, names: Sequence[str], lane: int = 0, max_bytes: Sequence[int] = ()) -> list[bytes | None]:
        limits = value_limits(names, max_bytes)
        return [limited(self._get(name), limit) for name, limit in zip(names, limits, strict=True)]

    def _get(self, name: str) -> bytes | None:
        value, ends = self.values.get(name, (None, None))
        return None if ends is not None and ends <= self._clock() else value

    async def put_many(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        ends = None if ttl_seconds is None else self._clock() + ttl_seconds
        self.values.update({name: (bytes(value), ends) for name, value in items})

    async def put_if_absent(self, name: str, value: bytes) -> None:
        if self._get(name) is None:
            self.values[name] = value, None

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        yield [name for name in list(self.values) if name.startswith(prefix)]

    async def close(self) -> None:
        """Do nothing: there is no connection."""
