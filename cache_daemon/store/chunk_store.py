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
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.memory.arena import Arena, footprint
from cache_daemon.memory.staging import Staging
from cache_daemon.remote.coordinator import RemoteCoordinator, RemoteSettings
from cache_daemon.store import pins, reuse_verdicts
from cache_daemon.store.bloom_filter import CountingBloomFilter
from cache_daemon.store.bulk_ops import BulkOps
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.commit import TwoPhaseCommit
from cache_daemon.store.counters import Counters
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.lookup import Lookup, MatchResult, TokenRanges
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.prefix_index import MatchedChunk, PrefixIndex
from cache_daemon.store.restore import StoreRestorer
from cache_daemon.store.reuse_verdicts import ReuseVerdicts
from cache_daemon.store.sessions import Session, SessionTable
from cache_daemon.store.shutdown import Shutdown
from cache_daemon.store.tenant_usage import TenantAccounts
from cache_daemon.store.tier_accounting import TierLedger
from cache_daemon.store.tier_manager import Clock, TierManager
from cache_daemon.store.ttl import TtlIndex

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
        accounts: TenantAccounts | None = None,
        bloom_filter: CountingBloomFilter | None = None,
        clock: Callable[[], float] | None = None,
        remote: RemoteSettings | None = None,
        span: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """``around`` surrounds work on the store's threads, which it is told the name of."""
        self.epoch = secrets.randbits(63) + 1
        self.arena, self.bloom_filter, self.accounts = (
            arena,
            bloom_filter,
            accounts if accounts is not None else TenantAccounts(),
        )
        self.events, self.sessions, self.counters = EventLog(self.epoch), SessionTable(), Counters()
        self._durable, self._staging_bytes, self._span = durable, staging_bytes, span
        self._started = time.monotonic()
        self._copy_threads = ThreadPoolExecutor(_COPY_THREADS, "copy")
        self._read_threads = ThreadPoolExecutor(_READ_THREADS, "durable-read")
        hot = TierLedger(new_policy, lambda limits: limits.arena_bytes)
        cold = TierLedger(new_policy, lambda limits: limits.store_bytes) if durable else None
        self._writer = GroupCommitWriter(durable, asyncio.get_running_loop()) if durable is not None else None
        self.tiers = TierManager(
            arena, PrefixIndex(bloom_filter), hot, cold, self._writer, self.events, self.accounts, self.counters,
            clock or Clock(),
        )  # fmt: skip
        self.verdicts = ReuseVerdicts(self._writer)
        self._persistence: Persistence | None = None
        if cold is not None and self._writer is not None:
            self._persistence = Persistence(self.tiers, cold, self._writer, durable_budget_bytes)
        self.ttl = TtlIndex(self.tiers, self._write_note)
        self._lookup = Lookup(
            self.tiers, self.ttl, durable, self._on(self._read_threads, "durable read"), self._wait_progress
        )
        most = int(((durable and durable_budget_bytes) or arena.size_bytes) * _PINNED_SHARE)
        self._pins = Pins(self.tiers, most, self._write_note)
        self._inserter = ChunkInserter(self.tiers, self._persistence, self._pins, self.ttl)
        self._commit = TwoPhaseCommit(self.tiers, self._inserter, self.epoch, self._on(self._copy_threads, "copy"))
        self.reserve, self.commit = self._commit.reserve, self._commit.commit
        self.abort, self.scoped_reservation = self._commit.abort, self._commit.scoped_reservation
        self.bulk = BulkOps(self.tiers, self.ttl, self._commit.invalidate)
        self.remote: RemoteCoordinator | None = None
        if remote is not None:
            self.remote = RemoteCoordinator(
                remote, self.bulk, self._inserter, self._write_note, self._lookup.acquire, self._wait_progress, span
            )
        self._upkeep: asyncio.Task[None] | None = None

    # ---- beginning and end ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up what the durable tier has, and begins the upkeep."""
        if self._durable is not None and self._persistence is not None:
            await StoreRestorer(self._inserter, self._persistence, self._restore_note).restore(
                self._durable, self._read_threads
            )
            self.ttl.finish_restore()
        if self.remote is not None:
            self.remote.start()
        self._upkeep = asyncio.create_task(self._run_upkeep())

    def _restore_note(self, name: bytes, value: bytes) -> None:
        if name.startswith(reuse_verdicts.NOTE_PREFIX):
            self.verdicts.restore(name, value)
        elif name.startswith(pins.NOTE_PREFIX):
            self._pins.restore(name, value)
        elif name.startswith(expiry_note.EXPIRY_NOTE_PREFIX):
            self.ttl.restore(name, value)
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
            self._lookup.apply_all_touches()
            self._persistence.write_recency()
            self.ttl.persist_changes()
            if not await shutdown.run(partial(self._writer.stop, shutdown.to_write)):
                log.error("the durable tier did not take all that was queued in time", failing=self._writer.failing)
        await shutdown.run(self._copy_threads.shutdown)
        await shutdown.run(self._read_threads.shutdown)
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
            hold.release()
        session.leases.clear()
        self._commit.abort(session, list(session.reservations))
        session.close_staging()

    def record_heartbeat(self, session: Session, totals: tuple[int, ...]) -> None:
        """Takes in a heartbeat's totals, which never fall; those of sessions that share no memory are not believed."""
        if session.shares_memory:
            self.counters.add_heartbeat(session.heartbeat_totals, totals)
        session.heartbeat_totals = totals

    # ---- chunks ---------------------------------------------------------------------------------------------

    def probe(self, root: bytes, ids: bytes) -> list[MatchedChunk]:
        """See ``Lookup.probe``."""
        return self._lookup.probe(root, ids)

    async def match(
        self,
        session: Session,
        tenant_salt: bytes,
        ids: bytes,
        contents: TokenRanges = (),
        window: int = 0,
        expires_at: float = inf,
    ) -> MatchResult:
        """See ``Lookup.match``."""
        root = keys.tenant_root(session.namespace, tenant_salt)
        result = await self._lookup.match(session, root, ids, contents, window, expires_at)
        if self._persistence is not None:
            self._persistence.retry_used(m.chunk for m in result.matches)
        if self.remote is not None:
            self.remote.enqueue_used(m.chunk for m in result.matches)
        return result

    def release(self, session: Session, lease_ids: Iterable[bytes]) -> int:
        """Gives leases back; unknown ones are ignored. Returns how many were held."""
        released = 0
        for lease_id in lease_ids:
            hold = session.leases.pop(lease_id, None)
            if hold is not None:
                hold.release()
                released += 1
        return released

    @contextlib.asynccontextmanager
    async def open_chunk(self, chunk: Chunk) -> AsyncIterator[memoryview]:
        """A chunk's payload, kept in the arena meanwhile. Raises ArenaFull when it cannot be brought in."""
        hold = await self._lookup.acquire(chunk)
        if hold is None or chunk.slot is None:
            raise ArenaFull("the chunk is stored, but could not be brought into the arena; try again later")
        with hold:
            yield await self.read_leased(chunk)

    async def read_leased(self, chunk: Chunk) -> memoryview:
        """The payload of a chunk that is in the arena, and is held there."""
        assert chunk.slot is not None, "a chunk that is held has a slot"
        return await asyncio.get_running_loop().run_in_executor(self._copy_threads, self.arena.read, chunk.slot)

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
            self._commit.invalidate(root, prefix_hash)
        async with self.bulk.await_disk_removal():
            if self.remote is None or (found is not None and found.root != root):
                return await self.bulk.delete(root, self.find(root, prefix_hash) if prefix_hash else None)
            elsewhere = self.remote.delete(root, prefix_hash, found is not None)  # from here on nothing comes back
            here = await self.bulk.delete(root, found) if found is not None or not prefix_hash else 0
            deleted = max(here, await self.remote.await_deletion(elsewhere))
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

    async def _run_upkeep(self) -> None:
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
                        self.ttl.persist_changes()
                self.sessions.expire_leases()
                if tick % _SWEEP_TICKS == 0:
                    await self.sweep()
            except Exception:
                log.exception("upkeep failed, going on")

    async def sweep(self) -> None:
        """Drops what has passed its time to live."""
        self.counters.expired_chunks += await self.bulk.expire()

    async def settle(self) -> None:
        """Waits until all that should be durable is. For tests and for orderly ends."""
        await self._commit.wait_idle()
        while self._persistence is not None and not self._persistence.is_settled:
            await self._persistence.wait_progress(0.1)

    def _on(self, threads: ThreadPoolExecutor, name: str) -> Callable[[Callable[[], T]], Awaitable[T]]:
        async def run(work: Callable[[], T]) -> T:
            with self._span(name):
                return await asyncio.get_running_loop().run_in_executor(threads, work)

        return run

    async def _wait_progress(self, seconds: float) -> bool:
        return self._persistence is not None and await self._persistence.wait_progress(seconds)

    def _write_note(self, name: bytes, value: bytes | None) -> None:
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
        self.counters.write_to(out)
        tiers, writer = self.tiers, self._writer
        out.epoch, out.uptime_seconds = self.epoch, time.monotonic() - self._started
        out.sessions = len(self.sessions)
        out.chunks, out.tokens = len(tiers.index), tiers.index.tokens
        out.arena_bytes, out.arena_used_bytes = self.arena.size_bytes, self.arena.used_bytes
        out.arena_chunks = len(tiers.arena_ledger)
        out.leases = sum(len(s.leases) for s in self.sessions)
        out.reservations = sum(len(s.reservations) for s in self.sessions)
        out.pinned_bytes = self._pins.pinned_bytes
        if self._durable is not None:
            out.durable_file_bytes = self._durable.usage().file_bytes
        if tiers.disk_ledger is not None and self._persistence is not None and writer is not None:
            out.durable_budget_bytes, out.durable_bytes = self._persistence.budget_bytes, tiers.disk_ledger.used_bytes
            out.durable_chunks, out.pending_writes = (
                len(tiers.disk_ledger),
                writer.pending + self._persistence.num_postponed,
            )
            out.durable_failing = (self.failing or ("",))[0]  # asked once: it may have ended the next time
        if self.remote is not None:
            self.remote.write_to(out)
        return out

    async def stats_of(self, root: bytes) -> StatsResponse:
        """Of one tenant's chunks in a namespace."""
        out = await self.bulk.count(root)
        out.epoch = self.epoch
        return out

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot and byte is accounted for exactly once, and every lease is kept."""
        tiers = self.tiers
        for part in (tiers, self.ttl, self._persistence):
            if part is not None:
                part.check_integrity()
        chunks = [*tiers.index, *tiers.zombies]
        slots = [*(c.slot for c in chunks if c.slot is not None), *tiers.pending_slots]
        pages = sum(footprint(slot.size_bytes) for slot in slots)
        assert pages == self.arena.used_bytes, f"slots hold {pages} bytes, the arena {self.arena.used_bytes}"
        held: Counter[int] = Counter(id(c) for s in self.sessions for hold in s.leases.values() for c in hold.chunks)
        # Calls that run now keep chunks, too.
        assert all(c.leases >= held[id(c)] for c in chunks), "a lease on a chunk that is not kept"
        self.sessions.check_integrity()
