"""What the store's state machine stands on: a store that can be restarted, and what a tester remembers of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, ChunkHeader, NamespaceDescriptor
from kvsidecar.errors import KVSidecarError, StoreUnavailable
from kvsidecar.layout import Geometry

from cache_daemon.durable.faulty import FaultyTier
from cache_daemon.durable.memory import MemoryTier
from cache_daemon.durable.tier import Loaded
from cache_daemon.eviction import POLICIES
from cache_daemon.limits import Priority, TenantLimits
from cache_daemon.memory.arena import Arena, MemoryArena
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.facade import ChunkStore
from cache_daemon.store.lookup import MatchResult
from cache_daemon.store.sessions import Session
from cache_daemon.store.summary import SummaryWriter
from cache_daemon.store.tenants import Accounts
from cache_daemon.store.writing import Reserved

PAGE = 4096
# A token takes a page, so that chunks differ in size and the arena fragments.
GEOMETRY = Geometry(2, 4, 64, DATA_TYPE_FLOAT32, 16)
ARENA_BYTES, STAGING_BYTES, DURABLE_BYTES = 24 * PAGE, 16 * PAGE, 40 * PAGE
LIMITS = {
    b"": TenantLimits(),
    b"quota": TenantLimits(arena_bytes=8 * PAGE, store_bytes=12 * PAGE, priority=Priority.LOW),
    b"brief": TenantLimits(ttl_seconds=100.0, entries=3),
    b"high": TenantLimits(priority=Priority.HIGH, pin_bytes=4 * PAGE),
}
BY_TENANT = {keys.tenant_id(salt): limits for salt, limits in LIMITS.items()}
salts = st.sampled_from(list(LIMITS))
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
ttls = st.sampled_from([0, 0, 0, 30, 200])
who = st.integers(0, 1)
few = st.sampled_from([frozenset[int]()] * 3 + [frozenset({0}), frozenset({1, 2})])
rarely = st.sampled_from([False] * 4 + [True])
Tokens = tuple[int, ...]
# Threads decide how far a call has come: what is drawn must not depend on it, so steps that do not fit do nothing.
_LIFE_STEPS = 10


def namespace() -> NamespaceDescriptor:
    return NamespaceDescriptor(
        model_fingerprint=b"m" * 32, architecture="Test", layers=2, kv_heads=4, head_dim=64, dtype=DATA_TYPE_FLOAT32,
        format_version=keys.FORMAT_VERSION, bits=16, tensor_parallel_size=1,
    )  # fmt: skip


def payload_of(key: bytes, size: int) -> bytes:
    """A chunk's payload names the chunk, its context included."""
    return (key * (size // len(key) + 1))[:size]


class Disk(MemoryTier):
    """What outlives a daemon. Each load gives headers of their own, as a disk does."""

    def load(self) -> list[Loaded]:
        return [Loaded(ChunkHeader.FromString(found[0].SerializeToString()), *found[1:]) for found in super().load()]


@dataclass(eq=False)
class Held:
    """A lease that the test holds, and what it showed when it was given."""

    session: Session
    result: MatchResult
    seen: list[tuple[Chunk, Any, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Open:
    """A reservation of the test."""

    session: Session
    root: bytes
    path: Tokens  # from the prompt's beginning to the chunk's end
    got: Reserved


@dataclass(eq=False)
class Call:
    """A call that runs beside the test's other steps."""

    session: Session
    task: asyncio.Task[Any]
    done: Any


class Ground(RuleBasedStateMachine):
    """Opens and ends a store, follows its events, and knows which paths must be found."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.policy = policy
        self.now = 1_000_000.0
        self.disk = Disk()
        self.alive: set[tuple[bytes, Tokens]] = set()  # paths that must be found
        self.removed: list[bytes] = []
        self.told: list[tuple[int, str, tuple[Tokens, int]]] = []  # what happened, for those who have to find out why
        self.paths: dict[bytes, tuple[bytes, Tokens, int]] = {}  # key -> root, path, where the chunk begins
        self.run(self._open())

    def arena(self) -> Arena:
        return MemoryArena(ARENA_BYTES)

    async def _open(self) -> None:
        self.told.append((0, "OPENED", ((), 0)))
        self.tier = FaultyTier(self.disk)
        self.bits = memoryview(bytearray(64))
        accounts = Accounts(lambda tenant: BY_TENANT[tenant])
        self.store = ChunkStore(
            self.arena(), self.tier, DURABLE_BYTES, POLICIES[self.policy], staging_bytes=STAGING_BYTES,
            accounts=accounts, summary=SummaryWriter(self.bits), clock=lambda: self.now,
        )  # fmt: skip
        await self.store.start()
        self.sessions = [self.attach(), self.attach()]
        self.held: list[Held] = []
        self.open: list[Open] = []
        self.calls: list[Call] = []
        self.events: list[pb.WatchResponse] = []
        self.heard = 0
        self.following = asyncio.create_task(self._follow())
        self.steps = 0
        await asyncio.sleep(0)

    async def _follow(self) -> None:
        async for event in self.store.events.follow(0, 0):
            if event.sequence_number:
                self.events.append(event)

    async def _hear(self) -> None:
        """Lets what was told arrive."""
        while len(self.events) + self.heard < self.store.events._last[b""]:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def hear_all(self) -> None:
        """Nothing has happened that was not told, until the loop runs again: calls may go on while it does."""
        self.run(self._hear())
        while len(self.events) + self.heard < self.store.events._last[b""]:
            self.run(self._hear())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def attach(self) -> Session:
        described = namespace()
        return self.store.open_session("s", described, keys.namespace_id(described))

    @property
    def tier_is_held(self) -> bool:
        return not self.tier._gate.is_set()

    def root(self, salt: bytes) -> bytes:
        return keys.tenant_root(keys.namespace_id(namespace()), salt)

    async def _stop(self) -> None:
        """What a restart begins with: the disk works again, calls end, sessions end."""
        self.tier._apply_errors.clear()
        self.tier._read_faults.clear()
        self.tier.let_go()
        await self._finish_calls()
        for session in self.sessions:
            self.store.close_session(session)
        self.held, self.open = [], []

    async def _finish_calls(self) -> None:
        for call in self.calls:
            with contextlib.suppress(KVSidecarError, asyncio.CancelledError):
                call.done(await call.task)
        self.calls = []
        await self.store._writing.idle()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.run(self._end())
        self.loop.close()

    async def _end(self) -> None:
        await self._stop()
        with contextlib.suppress(StoreUnavailable):  # the disk is slow to be well again
            await self.store.delete(b"", b"")
        async with asyncio.timeout(30):
            await self.store.settle()
        await asyncio.sleep(0.001)
        self.store.check_integrity()
        assert not self.store.tiers.detached, "a chunk that nobody uses was kept"
        assert self.store.arena.used_bytes == 0, "a slot leaked"
        assert not any(self.bits), "the summary holds what is deleted"
        stats = self.store.stats()
        assert (stats.leases, stats.reservations, stats.pinned_bytes, stats.sessions) == (0, 0, 0, 0)
        self.following.cancel()
        await self.store.close()
        assert self.disk.usage().entries == 0, "the disk holds what is deleted"
        assert not [n for n in self.disk.notes() if n.startswith(b"pin:")], "a pin outlives its chunk"

    def _check_match(self, session: Session, root: bytes, ids: list[int], result: MatchResult) -> None:
        held, at, parent = Held(session, result), 0, root
        for n, m in enumerate(result.matches):
            own = list(memoryview(m.chunk.ids).cast("I"))
            assert own[: m.tokens] == ids[at : at + m.tokens], "other tokens than were asked for"
            assert m.tokens == m.chunk.tokens or n == len(result.matches) - 1
            assert (m.chunk.parent_key, m.chunk.key) == (parent, keys.prefix_hash(parent, own)), "another context"
            at, parent = at + m.tokens, m.chunk.key
        for start, m in result.contents:
            assert list(memoryview(m.chunk.ids).cast("I")) == ids[start : start + m.tokens]
            assert m.chunk.root == root, "another tenant's chunk"
        if session.closed:  # since the answer was given, and its lease went with it
            return
        for m in (*result.matches, *(m for _, m in result.contents)):
            assert m.chunk.slot is not None
            seen = bytes(self.store.arena.read(m.chunk.slot))
            assert seen == payload_of(m.chunk.key, m.chunk.size_bytes), "other bytes than were committed"
            held.seen.append((m.chunk, m.chunk.slot, seen))
        if result.lease_id:
            self.held.append(held)

    def call(self, session: Session, work: Coroutine[Any, Any, Any], done: Any) -> Call:
        call = Call(session, self.loop.create_task(work), done)
        self.calls.append(call)
        return call

    async def _abandon(self) -> None:
        for call in self.calls:
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self.calls), return_exceptions=True)
        self.following.cancel()
        store = self.store
        assert store._upkeep is not None
        store._upkeep.cancel()
        assert store._writer is not None
        await asyncio.to_thread(store._writer.stop, 0.0)
        await asyncio.to_thread(store._writer._thread.join, 10)
        store._copying.shutdown()
        store._reading.shutdown()

    def durable(self) -> Iterator[Chunk]:
        return (c for c in self.store.tiers.index if c.on_disk is Residency.PRESENT)

    def _ends_durably(self, root: bytes, path: Tokens) -> bool:
        """Whether a path is found to its end in what is durable."""
        found = self.store.probe(root, keys.token_bytes(path))
        return sum(n for _, n in found) == len(path) and all(c.on_disk is Residency.PRESENT for c, _ in found)

    def _gone(self, key: bytes) -> None:
        """A chunk was evicted or deleted: paths that lead through its tokens may end now."""
        self.removed.append(key)
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        root, path, begin = self.paths[key]
        self.alive = {(r, p) for r, p in self.alive if r != root or p[: begin + 1] != path[: begin + 1]}

    def _note_events(self) -> None:
        corrupt = self.store.counts.corrupt_chunks
        for event in self.events:
            key = event.chunk.prefix_hash
            self.told.append(
                (
                    event.sequence_number,
                    pb.EventType.Name(event.type)[11:],
                    (self.paths[key][0][:2].hex(), *self.paths[key][1:]),
                )
            )
            if event.type == pb.EVENT_TYPE_EVICTED or (event.type == pb.EVENT_TYPE_DELETED and corrupt):
                self._gone(key)
        self.heard += len(self.events)
        self.events.clear()
