"""The chunk store: the facade over index, tiers, leases and persistence.

Everything runs on one event loop, except copies and disk reads, which run on their own threads. Invariants:

- The bytes that a reader sees were verified in the daemon's own copy, and do not change while they are leased.
- A chunk is in the index exactly when it can be matched; its ancestors are in the index too.
- When a session ends, all its leases, reservations and staging memory are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import StatsResponse, Welcome
from kvsidecar.errors import ChunkNotFound, FailedPrecondition, LimitExceeded

from cache_daemon.diagnostics.miss_explainer import MissExplainer
from cache_daemon.durable.durable_tier import DurableTier
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.durable.record_format import EXPIRY_NOTE_PREFIX
from cache_daemon.memory.arena import Arena
from cache_daemon.memory.gpu_arena import GpuArena
from cache_daemon.store import pins, retained_chunks, reuse_verdicts
from cache_daemon.store.arena_evictor import ArenaEvictor
from cache_daemon.store.bloom_filter import CountingBloomFilter
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.chunk_deleter import ChunkDeleter
from cache_daemon.store.chunk_groups import ChunkGroups
from cache_daemon.store.chunk_list import ChunkList
from cache_daemon.store.chunk_reader import ChunkReader
from cache_daemon.store.counters import Counters
from cache_daemon.store.disk_evictor import DiskEvictor
from cache_daemon.store.event_log import EventLog
from cache_daemon.store.gpu_tier import GpuTier
from cache_daemon.store.hint_applier import HintApplier
from cache_daemon.store.index_evictor import IndexEvictor
from cache_daemon.store.index_restorer import IndexRestorer
from cache_daemon.store.insertion import ChunkInserter
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.lookup import FetchHints, Lookup, MatchResult, TokenRanges
from cache_daemon.store.persistence import Persistence
from cache_daemon.store.pins import Pins
from cache_daemon.store.prefix_index import MatchedChunk, PrefixIndex
from cache_daemon.store.promoter import Promoter
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.reservations import Reservations
from cache_daemon.store.retained_chunks import RetainedChunks
from cache_daemon.store.reuse_verdicts import ReuseVerdicts
from cache_daemon.store.sessions import Session, SessionTable
from cache_daemon.store.shutdown import Shutdown
from cache_daemon.store.store_clock import StoreClock
from cache_daemon.store.store_config import StoreConfig
from cache_daemon.store.store_services import StoreServices
from cache_daemon.store.store_threads import StoreThreads
from cache_daemon.store.tenant_accounts import TenantAccounts
from cache_daemon.store.tier_manager import StoreContext, TierManager
from cache_daemon.store.tier_quotas import TierQuotas
from cache_daemon.store.ttl import TtlIndex
from cache_daemon.store.two_phase_commit import TwoPhaseCommit
from cache_daemon.store.upkeep import Upkeep

if TYPE_CHECKING:
    from cache_daemon.remote.bulk_transfer import TenantTransfer
    from cache_daemon.remote.coordinator import RemoteCoordinator, RemoteSettings

# Share of the durable tier (without a durable tier: of the arena) that may be pinned.
_MAX_PINNED_SHARE = 0.5

log = structlog.get_logger("cache_daemon")


class ChunkStore:
    """The store of one daemon. ``durable`` None keeps chunks in the arena only.

    Call ``start`` before anything else. Runs on one event loop.
    """

    def __init__(
        self,
        arena: Arena,
        durable: DurableTier | None,
        config: StoreConfig,
        *,
        accounts: TenantAccounts | None = None,
        bloom_filter: CountingBloomFilter | None = None,
        remote: RemoteSettings | None = None,
        gpu_arena: GpuArena | None = None,
    ) -> None:
        self.epoch = secrets.randbits(63) + 1
        self.arena, self.bloom_filter = arena, bloom_filter
        self.accounts = accounts if accounts is not None else TenantAccounts()
        self.events, self.sessions = EventLog(self.epoch), SessionTable(config.staging_bytes, arena.size_bytes)
        self.counters, self._started = Counters(), time.monotonic()
        self._durable, self._threads = durable, StoreThreads(config.span)
        arena_quotas = TierQuotas(config.new_policy, lambda limits: limits.arena_bytes)
        disk_quotas = TierQuotas(config.new_policy, lambda limits: limits.store_bytes) if durable else None
        self._writer = GroupCommitWriter(durable, asyncio.get_running_loop()) if durable is not None else None
        self.tiers = TierManager(
            arena, PrefixIndex(bloom_filter), arena_quotas, disk_quotas, self._writer,
            StoreContext(self.events, self.accounts, self.counters, StoreClock(config.clock)),
        )  # fmt: skip
        self.verdicts = ReuseVerdicts(self._writer)
        self._persistence: Persistence | None = None
        if disk_quotas is not None and self._writer is not None:
            evictor = DiskEvictor(self.tiers, disk_quotas, config.durable_budget_bytes)
            self._persistence = Persistence(self.tiers, evictor, self._writer)
        self.ttl, self.groups = TtlIndex(self.tiers), ChunkGroups(self.tiers)
        capacity_bytes = (durable and config.durable_budget_bytes) or arena.size_bytes
        self._pins = Pins(self.tiers, int(capacity_bytes * _MAX_PINNED_SHARE))
        self.retained = RetainedChunks(self.tiers, self._pins)
        hints = HintApplier(self.tiers, self.ttl, self.retained, self.groups)
        arena_evictor = ArenaEvictor(self.tiers)
        promoter = Promoter(arena_evictor, durable, self._persistence, self._threads)
        self.gpu = None if gpu_arena is None else GpuTier(self.tiers, gpu_arena, config.new_policy, self._threads)
        self._lookup = Lookup(self.tiers, hints, promoter)
        self.reader = ChunkReader(self.tiers, self._lookup, durable, self._threads)
        self._index_evictor = IndexEvictor(self.tiers, config.max_index_bytes)
        self._inserter = ChunkInserter(
            self.tiers, arena_evictor, self._index_evictor, self._persistence, self._pins, hints
        )
        self._reservations = Reservations(self.tiers, self._inserter)
        self._commit = TwoPhaseCommit(self.tiers, self._inserter, self._reservations, self.epoch, self._threads)
        self.open_session, self.commit = self.sessions.open, self._commit.commit
        self.reserve, self.abort = self._reservations.reserve, self._reservations.abort
        self.scoped_reservation = self._reservations.scoped_reservation
        self.misses = MissExplainer(self.tiers, self._reservations.pending_tokens)
        self.listing = ChunkList(self.tiers.index)
        self._deleter = ChunkDeleter(self.tiers, self.ttl, self._reservations.invalidate)
        self.remote: RemoteCoordinator | None = None
        if remote is not None:
            self.remote = remote.new_coordinator(
                StoreServices(self.tiers, self._deleter, self._inserter, self._lookup, self._persistence, self._threads)
            )
        self._upkeep = Upkeep(self.sessions, self._deleter, self.counters, self.ttl, self.retained, self._persistence)

    # ---- start and end --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore the durable tier's chunks and notes, and start upkeep and the remote tier."""
        if self._durable is not None and self._persistence is not None:
            await IndexRestorer(self._inserter, self._persistence, self._restore_note).restore(
                self._durable, self._threads.reading
            )
            self.ttl.finish_restore()
            self._pins.finish_restore()
            self.retained.finish_restore(self.ttl)
            await self._index_evictor.shrink()  # both spare pinned and retained chunks
            await self._persistence.evictor.shrink_to_budget()
        if self.remote is not None:
            self.remote.start()
        self._upkeep.start()

    def _restore_note(self, name: bytes, value: bytes) -> None:
        if name.startswith(reuse_verdicts.NOTE_PREFIX):
            self.verdicts.restore(name, value)
        elif name.startswith(pins.NOTE_PREFIX):
            self._pins.restore(name, value)
        elif name.startswith(EXPIRY_NOTE_PREFIX):
            self.ttl.restore(name, value)
        elif name.startswith(retained_chunks.NOTE_PREFIX):
            self.retained.restore(name, value)
        elif self.remote is not None:
            self.remote.restore_note(name, value)

    async def close(self) -> bool:
        """Write all queued changes and close the tiers within 20 s. Returns False if threads wait for a disk."""
        shutdown = Shutdown()
        await self._upkeep.stop()
        for session in self.sessions:
            self.close_session(session)
        if self.remote is not None:
            await self.remote.close()
        if self._persistence is not None and self._writer is not None:
            with contextlib.suppress(TimeoutError):  # to store the last use of chunks that were written meanwhile, too
                async with asyncio.timeout(0 if self._writer.hung else shutdown.to_settle):
                    await self._commit.wait_idle()
                    await self._persistence.finish()
            self._lookup.apply_all_touches()
            self._persistence.write_recency()
            self.ttl.persist_changes()
            if not await shutdown.run(partial(self._writer.stop, shutdown.to_write)):
                log.error("the durable tier did not write its queue in time", failing=self._writer.failing)
        if self.gpu is not None:
            self.gpu.stop()
        await shutdown.run(self._threads.copying.shutdown)
        await shutdown.run(self._threads.reading.shutdown)
        if self._durable is not None:
            await shutdown.run(self._durable.close)
        if not shutdown.late:
            if self.gpu is not None:
                await self.gpu.close()
            self.arena.close()
        return not shutdown.late

    # ---- sessions -------------------------------------------------------------------------------------------

    def close_session(self, session: Session) -> None:
        """Free all leases, reservations and memory of a session. Idempotent."""
        session.closed = True
        self.sessions.remove(session)
        for lease in session.leases.values():
            lease.release()
        session.leases.clear()
        self._reservations.abort(session, list(session.reservations))
        session.close_staging()

    # ---- chunks ---------------------------------------------------------------------------------------------

    def probe(self, root: bytes, ids: bytes) -> list[MatchedChunk]:
        """Return the longest stored prefix without leasing it; see ``Lookup.probe``."""
        return self._lookup.probe(root, ids)

    async def match(
        self,
        session: Session,
        tenant_salt: bytes,
        ids: bytes,
        contents: TokenRanges = (),
        window: int = 0,
        hints: PromptHints = NO_HINTS,
        fetching: FetchHints | None = None,
    ) -> MatchResult:
        """Match a prompt and lease the matched chunks; see ``Lookup.match``.

        With ``fetching`` and a remote tier, chunks that this node lacks are fetched first; ``window`` is then ignored.
        """
        root, fetched = keys.tenant_root(session.namespace, tenant_salt), None
        if self.remote is not None and fetching is not None and fetching.chunk_ends:
            window, fetched = 0, await self.remote.fetch(session, tenant_salt, ids, fetching, hints)
        result = await self._lookup.match(session, root, ids, contents, window, hints)
        if self._persistence is not None:
            self._persistence.retry_used(m.chunk for m in result.matches)
        if self.remote is not None:
            self.remote.enqueue_used(m.chunk for m in result.matches)
        if self.gpu is not None and session.reads_gpu:
            self.gpu.record_match([*result.matches, *(m for _, m in result.contents)])
        if fetched is not None:
            tokens = min(fetched.tokens, result.matched_tokens)
            result = replace(
                result, fetched_tokens=tokens, fetch_ms=fetched.seconds * 1e3, load_slower=fetched.load_slower
            )
        return result

    @property
    def now(self) -> float:
        """The time on the store's clock, in Unix seconds."""
        return self.tiers.clock()

    def acquire(self, session: Session, chunks: Sequence[Chunk]) -> LeaseGuard:
        """Lease a session's leased chunks once more while a ``with`` block runs."""
        return LeaseGuard(chunks, self.tiers.on_released, session.usage)

    def release(self, session: Session, lease_ids: Iterable[bytes]) -> int:
        """Release leases; unknown ids are ignored. Returns the number of released leases."""
        known = [lease for i in lease_ids if (lease := session.leases.pop(i, None)) is not None]
        for lease in known:
            lease.release()
        return len(known)

    def find(self, root: bytes, prefix_hash: bytes) -> Chunk:
        """Return a tenant's chunk by its prefix hash. Raises ChunkNotFound."""
        chunk = self.tiers.index.get(prefix_hash)
        if chunk is None or chunk.root != root:
            raise ChunkNotFound(f"no chunk {prefix_hash.hex() or '(empty)'} is stored in this namespace and tenant")
        return chunk

    def pin(self, root: bytes, prefix_hash: bytes, caller: str = "") -> int:
        """Exempt a prefix from eviction. Returns its number of chunks. Raises ChunkNotFound, QuotaExceeded.

        ``caller`` is the name of an external caller, whose limits then apply.
        """
        return self._pins.add(self.find(root, prefix_hash), caller)

    def unpin(self, root: bytes, prefix_hash: bytes, caller: str = "") -> int:
        """End one pin, preferably the caller's own. Returns the prefix's number of chunks. Raises ChunkNotFound."""
        return self._pins.remove(root, prefix_hash, caller)

    async def delete(self, root: bytes, prefix_hash: bytes, owner: Hashable | None = None) -> int:
        """Delete a chunk with its subtree, a tenant's chunks, or everything.

        Without ``prefix_hash`` it deletes the tenant's chunks; if ``root`` is empty as well, everything. ``owner`` is
        the external caller whose limits apply; None on the private socket. Returns the number of deleted chunks. Raises
        ChunkNotFound, StoreUnavailable, and LimitExceeded when too many deletions wait for the remote tier. Even then,
        the chunks are deleted on this node.
        """
        found = self.tiers.index.get(prefix_hash)
        if found is None:  # the chunk may be reserved only
            self._reservations.invalidate(root, prefix_hash)
        async with self._deleter.await_disk_removal():
            if self.remote is None or (found is not None and found.root != root):
                return await self._deleter.delete(root, self.find(root, prefix_hash) if prefix_hash else None)
            there: asyncio.Future[int] | LimitExceeded
            try:  # from now on no fetch reads the chunks
                there = self.remote.delete(root, prefix_hash, is_known=found is not None, owner=owner)
            except LimitExceeded as error:
                there = error
            here = await self._deleter.delete(root, found) if found is not None or not prefix_hash else 0
            if isinstance(there, LimitExceeded):
                raise LimitExceeded(f"{here} chunks were deleted on this node, none in the remote tier: {there}")
            deleted = max(here, await self.remote.await_deletion(there))
            if prefix_hash and not deleted:
                self.find(root, prefix_hash)
            return deleted

    @property
    def transfer(self) -> TenantTransfer:
        """Transfers of whole tenants to the remote tier, and from it. Raises FailedPrecondition without one."""
        if self.remote is None:
            raise FailedPrecondition("this daemon has no remote tier; start it with --remote")
        return self.remote.transfer

    # ---- memory ---------------------------------------------------------------------------------------------

    def describe_memory(self, welcome: Welcome) -> None:
        """Fill in the data by which a worker maps the arenas and the Bloom filter."""
        welcome.arena.CopyFrom(self.arena.describe())
        if self.gpu is not None:
            welcome.gpu_arena.CopyFrom(self.gpu.arena.describe())
        if self.bloom_filter is not None:
            welcome.summary.CopyFrom(self.bloom_filter.describe())

    def staging_of(self, session_id: bytes) -> int:
        """Return the file descriptor of a session's staging memory. Raises KeyError if there is none."""
        session = self.sessions.find(session_id)
        if session is None or session.staging is None or not session.shares_memory:
            raise KeyError(session_id)
        return session.staging.descriptor

    async def sweep(self) -> None:
        """Remove expired chunks; see ``Upkeep.sweep``."""
        await self._upkeep.sweep()

    async def settle(self) -> None:
        """Wait until all chunks that should be durable are. For tests and shutdown."""
        await self._commit.wait_idle()
        if self._persistence is not None:
            await self._persistence.settle()

    @property
    def has_durable_tier(self) -> bool:
        """True if the store has a durable tier."""
        return self._writer is not None

    @property
    def has_remote_tier(self) -> bool:
        """True if the store has a remote tier."""
        return self.remote is not None

    @property
    def remote_failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic seconds) of an outage of the remote tier; None while it works."""
        return self.remote.failing if self.remote is not None else None

    @property
    def failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic seconds) of an outage of the durable tier; None while it works."""
        return self._persistence.failing if self._persistence is not None else None

    # ---- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StatsResponse:
        """Return the statistics of the whole store."""
        out = StatsResponse()
        self.counters.write_to(out)
        self.tiers.write_to(out)
        out.epoch, out.uptime_seconds = self.epoch, time.monotonic() - self._started
        if self.gpu is not None:
            self.gpu.write_to(out)
        out.sessions, out.leases = len(self.sessions), sum(len(s.leases) for s in self.sessions)
        out.reservations = sum(len(s.reservations) for s in self.sessions)
        out.pinned_bytes, out.retained_bytes = self._pins.pinned_bytes, self.retained.retained_bytes
        if self._durable is not None:
            out.durable_file_bytes = self._durable.usage().file_bytes
        if self._persistence is not None:
            self._persistence.write_to(out)
        if self.remote is not None:
            self.remote.write_to(out)
        return out

    async def stats_of(self, root: bytes) -> StatsResponse:
        """Return the statistics of one tenant's chunks in a namespace."""
        out = await self.listing.count(root)
        out.epoch = self.epoch
        return out

    def check_integrity(self) -> None:
        """Raise AssertionError unless all slots, bytes and leases add up."""
        for part in (self.tiers, self.gpu, self.ttl, self._pins, self.retained, self.groups, self._persistence):
            if part is not None:
                part.check_integrity()
        self.sessions.check_integrity([*self.tiers.index, *self.tiers.zombies])
