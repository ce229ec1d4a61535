"""Nodes of a fleet in this process: stores that share a remote backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.condition_wait import until_async
from cache_daemon.durable.encryption import Cipher, NullCipher
from cache_daemon.remote.backend import RemoteBackend, RemoteFailed
from cache_daemon.remote.coordinator import RemoteCoordinator, RemoteSettings
from cache_daemon.remote.fetch_request import FetchResult
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.write_behind import RemoteWrite
from cache_daemon.store.lookup import FetchHints
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.stores import Bench, opened

# A known prefill cost, so high that every stored chunk is worth a fetch.
PRICE = 1.0
CHUNK = 16


def prompt(chunks: int, first: int = 0) -> list[int]:
    """Return the tokens of ``chunks`` chunks. Prompts with different ``first`` share no prefix."""
    return [first * 100_000 + i for i in range(chunks * CHUNK)]


def cuts_of(ids: list[int]) -> list[int]:
    return list(accumulate([CHUNK] * (len(ids) // CHUNK) + ([len(ids) % CHUNK] if len(ids) % CHUNK else [])))


@dataclass
class FleetNode:
    """A store with its remote tier, and a worker's operations on them."""

    bench: Bench
    tier: RemoteTier

    @property
    def remote(self) -> RemoteCoordinator:
        assert self.bench.store.remote is not None
        return self.bench.store.remote

    @property
    def stats(self) -> pb.StatsResponse:
        return self.bench.store.stats()

    async def read(self, ids: list[int], salt: bytes = b"", deleted: bool = False) -> None:
        """Store a prompt, as a worker does that has computed it.

        ``deleted`` says that the tenant may be deleted meanwhile, which invalidates reservations.
        """
        parent = b""
        for start, end in pairwise([0, *cuts_of(ids)]):
            key = keys.prefix_hash(parent or self.bench.root(salt), ids[start:end])
            if self.bench.store.tiers.index.get(key) is None:
                _, outcome = await self.bench.put(ids[start:end], start, parent, salt)
                if deleted and outcome == pb.COMMIT_OUTCOME_PARENT_MISSING:
                    return
                assert outcome == pb.COMMIT_OUTCOME_COMMITTED
            parent = key

    async def ask(
        self, ids: list[int], salt: bytes = b"", price: float = PRICE, patience: float = 5.0
    ) -> tuple[int, FetchResult]:
        """Look a prompt up and check every byte. Returns the number of found tokens, and the remote fetch's result."""
        brought = await self.remote.fetch(
            self.bench.session, salt, keys.token_bytes(ids), FetchHints(cuts_of(ids), price, patience)
        )  # fmt: skip
        return await self.bench.found(ids, salt), brought

    async def share(self, ids: list[int], salt: bytes = b"", deleted: bool = False) -> None:
        """Store a prompt and use it again, so that the backend gets its chunks. ``deleted`` is as in ``read``."""
        await self.read(ids, salt, deleted)
        await self.bench.found(ids, salt)
        await self.sent()

    async def sent(self) -> None:
        await asyncio.wait_for(self.remote.settle(), 60)


@asynccontextmanager
async def node(
    engine: RemoteBackend,
    *,
    write: RemoteWrite = "second-use",
    ttl_seconds: int | None = None,
    cipher: Cipher | None = None,
    prefix: str = "t",
    clock: Callable[[], float] = time.time,
    arena_bytes: int = 400 * 4096,
    **store: object,
) -> AsyncIterator[FleetNode]:
    """Run a connected node while the ``with`` block runs."""
    tier = RemoteTier(engine, KeySchema(prefix), cipher or NullCipher(), clock)
    settings = RemoteSettings(tier, write, ttl_seconds)
    async with opened(arena_bytes, remote=settings, **store) as bench:  # type: ignore[arg-type]
        await until_async(lambda: tier.reads.allows_calls and tier.writes.allows_calls)
        yield FleetNode(bench, tier)


class Slow(InMemoryBackend):
    """A backend that delays calls, hangs and fails on command, and counts reads."""

    def __init__(self, part_bytes: int = 1 << 20) -> None:
        super().__init__(part_bytes)
        self.seconds, self.fails, self.calls, self.hangs_at, self.hanging = 0.0, False, 0, 0, 0
        self._since = self.scans = self.putting = 0
        self.put_gate = asyncio.Event()
        self.put_gate.set()

    async def get_many(self, names, lane=0, max_bytes=()):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.fails:
            raise RemoteFailed("told to")
        if len(names) == 1 and names[0].endswith("/mark"):
            return await super().get_many(names, lane, max_bytes)
        if self.hangs_at:
            self._since += 1
            if self._since >= self.hangs_at:
                self.hanging += 1
                await asyncio.sleep(60)
        else:
            self._since = 0
        await asyncio.sleep(self.seconds)
        return await super().get_many(names, lane, max_bytes)

    async def put_many(self, items, ttl_seconds):  # type: ignore[no-untyped-def]
        if self.fails:
            raise RemoteFailed("told to")
        if not items[0][0].endswith("probe"):
            self.putting += 1
            await self.put_gate.wait()
            self.putting -= 1
        await super().put_many(items, ttl_seconds)

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        self.scans += 1
        async for page in super().scan(prefix):
            yield page


class Gated(InMemoryBackend):
    """A backend that reads payloads at once, but delivers them on command."""

    def __init__(self) -> None:
        super().__init__()
        self.arrive, self.waiting, self.downloaded = asyncio.Event(), False, 0
        self.arrive.set()

    async def get_many(self, names, lane=0, max_bytes=()):  # type: ignore[no-untyped-def]
        found = await super().get_many(names, lane, max_bytes)
        if not names[0].endswith(("/mark", "/head")):
            self.waiting = True
            await self.arrive.wait()
            self.downloaded += 1
        return found


def parent_of(a: FleetNode, ids: list[int], chunks: int) -> bytes:
    parent = a.bench.root()
    for end in cuts_of(ids)[:chunks]:
        parent = keys.prefix_hash(parent, ids[end - CHUNK : end])
    return parent


def name_of(engine: InMemoryBackend, key: bytes, what: str) -> str:
    names = [n for n in engine.values if f"/{key.hex()}/" in n]
    return next(n for n in names if n.endswith("/head") == (what == "head"))
