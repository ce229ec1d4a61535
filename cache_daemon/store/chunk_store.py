"""The store: one facade over its rooms. All of it runs on one event loop; copies and reads have threads of their own.

Invariants:

- What a reader sees was verified in the daemon's own copy, and does not change while anybody holds a lease.
- A chunk is in the index exactly when it can be matched; its parents are there too.
- Everything that a session holds is freed when the session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import TypeVar

import structlog
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.errors import ArenaFull, ChunkNotFound, NamespaceMismatch

from cache_daemon.durable import expiry_note
from cache_daemon.durable.durable_tier import DurableTier
from cache_daemon.durable.group_commit_writer import DurableWriter
from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.memory.arena import Arena, footprint
from cache_daemon.memory.staging import Staging
from cache_daemon.remote.coordinator import Remote, RemoteSettings
from cache_daemon.store import pins, reuse_verdicts
from cache_daemon.store.bloom_filter import SummaryWriter
from cache_daemon.store.bulk_ops import Walks
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.commit import Writing
from cache_daemon.store.counters import Counters
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.insertion import Inserter
from cache_daemon.store.lookup import Lookup, MatchResult, Stretches
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.prefix_index import Found, PrefixIndex
from cache_daemon.store.restore import Restoring
from cache_daemon.store.reuse_verdicts import Verdicts
from cache_daemon.store.sessions import Session, Sessions
from cache_daemon.store.shutdown import Shutdown
from cache_daemon.store.tenant_usage import Accounts
from cache_daemon.store.tier_accounting import Shelf
from cache_daemon.store.tier_manager import Clock, Tiers
from cache_daemon.store.ttl import Terms

_TICK_SECONDS, _RECENCY_TICKS, _SWEEP_TICKS = 1.0, 15, 10
# Of the durable tier, without one of the arena, so much may be pinned.
_PINNED_SHARE = 0.5
_COPY_THREADS, _READ_THREADS = 2, 4

T = TypeVar("T")
log = structlog.get_logger("cache_daemon")


class ChunkStore:
    """See the module. ``durable`` None keeps everything in the arena only. Call ``start`` before anything else."""

    def __init__(
        self,
        arena: Arena,
        durable: DurableTier | None,
        durable_budget_bytes: int,
        new_policy: Callable[[], EvictionPolicy],
        *,
        staging_bytes: int = 64 << 20,
        accounts: Accounts | None = None,
        summary: SummaryWriter | None = None,
        clock: Callable[[], float] | None = None,
        remote: RemoteSettings | None = None,
        around: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """``around`` surrounds work on the store's threads, which it is told the name of."""
        self.epoch = secrets.randbits(63) + 1
        self.arena, self.summary, self.accounts = arena, summary, accounts if accounts is not None else Accounts()
        self.events, self.sessions, self.counts = EventLog(self.epoch), Sessions(), Counters()
        self._durable, self._staging_bytes, self._around = durable, staging_bytes, around
        self._started = time.monotonic()
        self._copying = ThreadPoolExecutor(_COPY_THREADS, "copy")
        self._reading = ThreadPoolExecutor(_READ_THREADS, "durable-read")
        hot = Shelf(new_policy, lambda limits: limits.arena_bytes)
        cold = Shelf(new_policy, lambda limits: limits.store_bytes) if durable else None
        self._writer = DurableWriter(durable, asyncio.get_running_loop()) if durable is not None else None
        self.tiers = Tiers(
            arena, PrefixIndex(summary), hot, cold, self._writer, self.events, self.accounts, self.counts,
            clock or Clock(),
        )  # fmt: skip
        self.verdicts = Verdicts(self._writer)
        self._persistence: Persistence | None = None
        if cold is not None and self._writer is not None:
            self._persistence = Persistence(self.tiers, cold, self._writer, durable_budget_bytes)
        self.terms = Terms(self.tiers, self._note)
        self._lookup = Lookup(self.tiers, self.terms, durable, self._on(self._reading, "durable read"), self._progress)
        most = int(((durable and durable_budget_bytes) or arena.size_bytes) * _PINNED_SHARE)
        self._pins = Pins(self.tiers, most, self._note)
        self._inserter = Inserter(self.tiers, self._persistence, self._pins, self.terms)
        self._writing = Writing(self.tiers, self._inserter, self.epoch, self._on(self._copying, "copy"))
        self.reserve, self.commit = self._writing.reserve, self._writing.commit
        self.abort, self.staged = self._writing.abort, self._writing.staged
        self.walks = Walks(self.tiers, self.terms, self._writing.void)
        self.remote: Remote | None = None
        if remote is not None:
            self.remote = Remote(
                remote, self.walks, self._inserter, self._note, self._lookup.hold, self._progress, around
            )
        self._upkeep: asyncio.Task[None] | None = None

    # ---- beginning and end ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up what the durable tier has, and begins the upkeep."""
        if self._durable is not None and self._persistence is not None:
            await Restoring(self._inserter, self._persistence, self._take_up).restore(self._durable, self._reading)
            self.terms.restored()
        if self.remote is not None:
            self.remote.start()
        self._upkeep = asyncio.create_task(self._keep_up())

    def _take_up(self, name: bytes, value: bytes) -> None:
        if name.startswith(reuse_verdicts.NOTE_PREFIX):
            self.verdicts.restore(name, value)
        elif name.startswith(pins.NOTE_PREFIX):
            self._pins.restore(name, value)
        elif name.startswith(expiry_note.NOTE_PREFIX):
            self.terms.restore(name, value)
        elif self.remote is not None:
            self.remote.restore(name, value)

    async def close(self) -> bool:
        """Writes what is queued and closes the tiers, in 20 s. False when threads are left that wait for a disk."""
        shutdown = Shutdown()
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        for session in self.sessions:
            self.close_session(session)
        if self.remote is not None:
            await self.remote.close()
        if self._persistence is not None and self._writer is not None:
            self._persistence.retry_all()
            with contextlib.suppress(TimeoutError):  # what is written meanwhile has a time of last use, too
                await asyncio.wait_for(self.settle(), 0 if self._writer.hung else shutdown.to_settle)
            self._lookup.touch_all()
            self._persistence.write_recency()
            self.terms.write_down()
            if not await shutdown.run(partial(self._writer.stop, shutdown.to_write)):
                log.error("the durable tier did not take all that was queued in time", failing=self._writer.failing)
        await shutdown.run(self._copying.shutdown)
        await shutdown.run(self._reading.shutdown)
        if self._durable is not None:
            await shutdown.run(self._durable.close)
        if not shutdown.late:
            self.arena.close()
        return not shutdown.late

    # ---- sessions -------------------------------------------------------------------------------------------

    def open_session(
        self,
        name: str,
        descriptor: NamespaceDescriptor,
        namespace: bytes,
        *,
        shares_memory: bool = True,
        owner: object = None,
        listed: bool = True,
    ) -> Session:
        """Begins a session of ``owner``; one that is not listed is the daemon's own, for the length of one call. Raises
        NamespaceMismatch."""
        expected = keys.namespace_id(descriptor)
        if namespace != expected:
            raise NamespaceMismatch(
                f"the namespace id {namespace.hex()[:64] or '(empty)'} does not belong to the descriptor sent "
                f"(its id is {expected.hex()}); worker and daemon must be of the same version"
            )
        if descriptor.format_version != keys.FORMAT_VERSION:
            raise NamespaceMismatch(
                f"format_version is {descriptor.format_version}; this daemon stores {keys.FORMAT_VERSION}"
            )
        allowed = None if shares_memory else self.sessions.allowance(owner, self._staging_bytes)
        staging = Staging(self._staging_bytes, allowed)
        session = Session(name, namespace, descriptor, staging, shares_memory, owner=owner)
        if listed:
            self.sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        """Frees all that the session holds. Idempotent."""
        session.closed = True
        self.sessions.remove(session)
        for hold in session.leases.values():
            hold.give_back()
        session.leases.clear()
        self._writing.abort(session, list(session.reservations))
        session.close_staging()

    def report(self, session: Session, totals: tuple[int, ...]) -> None:
        """Takes in a heartbeat's totals, which never fall; those of sessions that share no memory are not believed."""
        if session.shares_memory:
            self.counts.add_served(session.reported, totals)
        session.reported = totals

    # ---- chunks ---------------------------------------------------------------------------------------------

    def probe(self, root: bytes, ids: bytes) -> list[Found]:
        """See ``Lookup.probe``."""
        return self._lookup.probe(root, ids)

    async def match(
        self,
        session: Session,
        tenant_salt: bytes,
        ids: bytes,
        contents: Stretches = (),
        window: int = 0,
        until: float = inf,
    ) -> MatchResult:
        """See ``Lookup.match``."""
        root = keys.tenant_root(session.namespace, tenant_salt)
        result = await self._lookup.match(session, root, ids, contents, window, until)
        if self._persistence is not None:
            self._persistence.seen_again(m.chunk for m in result.matches)
        if self.remote is not None:
            self.remote.used(m.chunk for m in result.matches)
        return result

    def release(self, session: Session, lease_ids: Iterable[bytes]) -> int:
        """Gives leases back; unknown ones are ignored. Returns how many were held."""
        released = 0
        for lease_id in lease_ids:
            hold = session.leases.pop(lease_id, None)
            if hold is not None:
                hold.give_back()
                released += 1
        return released

    @contextlib.asynccontextmanager
    async def reading(self, chunk: Chunk) -> AsyncIterator[memoryview]:
        """A chunk's payload, kept in the arena meanwhile. Raises ArenaFull when it cannot be brought in."""
        hold = await self._lookup.hold(chunk)
        if hold is None or chunk.slot is None:
            raise ArenaFull("the chunk is stored, but could not be brought into the arena; try again later")
        with hold:
            yield await self.read(chunk)

    async def read(self, chunk: Chunk) -> memoryview:
        """The payload of a chunk that is in the arena, and is held there."""
        assert chunk.slot is not None, "a chunk that is held has a slot"
        return await asyncio.get_running_loop().run_in_executor(self._copying, self.arena.read, chunk.slot)

    def find(self, root: bytes, prefix_hash: bytes) -> Chunk:
        """Raises ChunkNotFound."""
        chunk = self.tiers.index.get(prefix_hash)
        if chunk is None or chunk.root != root:
            raise ChunkNotFound(f"no chunk {prefix_hash.hex() or '(empty)'} is stored in this namespace and tenant")
        return chunk

    def pin(self, root: bytes, prefix_hash: bytes) -> int:
        """Exempts a prefix from eviction. Returns its chunks. Raises ChunkNotFound, QuotaExceeded."""
        return self._pins.add(self.find(root, prefix_hash))

    def unpin(self, root: bytes, prefix_hash: bytes) -> int:
        """Ends one pin. Returns the prefix's chunks. Raises ChunkNotFound."""
        return self._pins.remove(root, prefix_hash)

    async def delete(self, root: bytes, prefix_hash: bytes) -> int:
        """Removes a chunk with all that continues it, a tenant's chunks, or with neither everything. Returns how many.
        Raises ChunkNotFound, StoreUnavailable; LimitExceeded when too much waits for the remote tier."""
        found = self.tiers.index.get(prefix_hash)
        if found is None:  # it may be on its way
            self._writing.void(root, prefix_hash)
        async with self.walks.on_disk():
            if self.remote is None or (found is not None and found.root != root):
                return await self.walks.delete(root, self.find(root, prefix_hash) if prefix_hash else None)
            elsewhere = self.remote.forget(root, prefix_hash, found is not None)  # from here on nothing comes back
            here = await self.walks.delete(root, found) if found is not None or not prefix_hash else 0
            deleted = max(here, await self.remote.finished(elsewhere))
            if prefix_hash and not deleted:
                self.find(root, prefix_hash)
            return deleted

    # ---- memory ---------------------------------------------------------------------------------------------

    def staging_of(self, session_id: bytes) -> int:
        """The file descriptor of a session's staging. Raises KeyError when there is no such session, or it has none."""
        session = self.sessions.find(session_id)
        if session is None or session.staging is None or not session.shares_memory:
            raise KeyError(session_id)
        return session.staging.descriptor

    # ---- upkeep ---------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Once a second: tries again what was not written, gives idle memory back, writes recency down, sweeps what has
        expired."""
        tick = 0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            tick += 1
            try:
                for session in self.sessions:
                    if session.staging is not None:
                        session.staging.trim()
                if self._persistence is not None:
                    self._persistence.retry()
                    if tick % _RECENCY_TICKS == 0:
                        self._persistence.write_recency()
                        self.terms.write_down()
                self.sessions.end_leases()
                if tick % _SWEEP_TICKS == 0:
                    await self.sweep()
            except Exception:
                log.exception("upkeep failed, going on")

    async def sweep(self) -> None:
        """Drops what has passed its time to live."""
        self.counts.expired_chunks += await self.walks.expire()

    async def settle(self) -> None:
        """Waits until all that should be durable is. For tests and for orderly ends."""
        await self._writing.idle()
        while self._persistence is not None and not self._persistence.settled:
            await self._persistence.progress(0.1)

    def _on(self, threads: ThreadPoolExecutor, name: str) -> Callable[[Callable[[], T]], Awaitable[T]]:
        async def run(work: Callable[[], T]) -> T:
            with self._around(name):
                return await asyncio.get_running_loop().run_in_executor(threads, work)

        return run

    async def _progress(self, seconds: float) -> bool:
        return self._persistence is not None and await self._persistence.progress(seconds)

    def _note(self, name: bytes, value: bytes | None) -> None:
        if self._writer is not None:
            self._writer.note(name, value)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Why the durable tier cannot be written to, and since when (monotonic seconds); None while it can."""
        return self._persistence.failing if self._persistence is not None else None

    # ---- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StatsResponse:
        """Of the whole store."""
        out = StatsResponse()
        self.counts.fill(out)
        tiers, writer = self.tiers, self._writer
        out.epoch, out.uptime_seconds = self.epoch, time.monotonic() - self._started
        out.sessions = len(self.sessions)
        out.chunks, out.tokens = len(tiers.index), tiers.index.tokens
        out.arena_bytes, out.arena_used_bytes = self.arena.size_bytes, self.arena.used_bytes
        out.arena_chunks = len(tiers.hot)
        out.leases = sum(len(s.leases) for s in self.sessions)
        out.reservations = sum(len(s.reservations) for s in self.sessions)
        out.pinned_bytes = self._pins.pinned_bytes
        if self._durable is not None:
            out.durable_file_bytes = self._durable.usage().file_bytes
        if tiers.cold is not None and self._persistence is not None and writer is not None:
            out.durable_budget_bytes, out.durable_bytes = self._persistence.budget_bytes, tiers.cold.used_bytes
            out.durable_chunks, out.pending_writes = len(tiers.cold), writer.pending + self._persistence.postponed
            out.durable_failing = (self.failing or ("",))[0]  # asked once: it may have ended the next time
        if self.remote is not None:
            self.remote.fill(out)
        return out

    async def stats_of(self, root: bytes) -> StatsResponse:
        """Of one tenant's chunks in a namespace."""
        out = await self.walks.count(root)
        out.epoch = self.epoch
        return out

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot and byte is accounted for exactly once, and every lease is kept."""
        tiers = self.tiers
        for part in (tiers, self.terms, self._persistence):
            if part is not None:
                part.check_integrity()
        chunks = [*tiers.index, *tiers.detached]
        slots = [*(c.slot for c in chunks if c.slot is not None), *tiers.promised]
        pages = sum(footprint(slot.size_bytes) for slot in slots)
        assert pages == self.arena.used_bytes, f"slots hold {pages} bytes, the arena {self.arena.used_bytes}"
        held: Counter[int] = Counter(id(c) for s in self.sessions for hold in s.leases.values() for c in hold.chunks)
        # Calls that run now keep chunks, too.
        assert all(c.leases >= held[id(c)] for c in chunks), "a lease on a chunk that is not kept"
        self.sessions.check_integrity()
