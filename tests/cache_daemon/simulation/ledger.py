"""The test's records about a simulated daemon: paths, leases, reservations, running calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvsidecar import keys

from cache_daemon.memory.arena import Slot
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.lookup import MatchResult
from cache_daemon.store.reservations import ReserveResult
from cache_daemon.store.sessions import Session


class Path(NamedTuple):
    """Position of a chunk in a prompt.

    ``tokens`` are all tokens up to the chunk's end, and ``begin`` is the chunk's start. ``chain`` has the keys of all
    chunks up to this one.
    """

    root: bytes
    tokens: tuple[int, ...]
    begin: int
    chain: tuple[bytes, ...]

    @property
    def ids(self) -> bytes:
        return keys.token_bytes(self.tokens)


@dataclass(eq=False)
class Life:
    """The time from a start of a daemon to its end or crash, and the tasks that end with it."""

    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    is_over: bool = False


@dataclass(eq=False)
class Held:
    """A lease of the test, and the bytes that the leased chunks had at first."""

    session: Session
    result: MatchResult
    seen: list[tuple[Chunk, Any, bytes]] = field(default_factory=list)
    seen_on_gpu: list[tuple[Slot, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Open:
    """A reservation of the test."""

    session: Session
    key: bytes
    got: ReserveResult


@dataclass(eq=False)
class Call:
    """A call that runs concurrently with later steps."""

    name: str
    session: Session | None
    root: bytes
    task: asyncio.Task[Any]
