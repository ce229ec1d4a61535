"""Store in this process, with a durable tier that fails and waits on command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import new_header

from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.durable.durable_tier import DurableTier
from cache_daemon.eviction import DEFAULT, POLICIES
from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.memory.arena import MemoryArena
from cache_daemon.memory.gpu_arena import GpuArena
from cache_daemon.remote.coordinator import RemoteSettings
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.reservations import ReserveResult
from cache_daemon.store.sessions import Session
from cache_daemon.store.store_config import StoreConfig
from cache_daemon.store.tenant_accounts import TenantAccounts
from tests.cache_daemon.conftest import GEOMETRY, descriptor, payload_of
from tests.cache_daemon.doubles.faulty_tier import FaultyTier
from tests.cache_daemon.doubles.memory_tier import MemoryTier


@dataclass
class FakeClock:
    """A clock in seconds, which the test advances."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A running store with one session, and short forms of a worker's operations."""

    store: ChunkStore
    tier: FaultyTier
    clock: FakeClock
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.open()

    def open(self) -> Session:
        described = descriptor()
        return self.store.open_session("s", described, keys.namespace_id(described))

    @staticmethod
    def root(salt: bytes = b"") -> bytes:
        return keys.tenant_root(keys.namespace_id(descriptor()), salt)

    @staticmethod
    def header(ids: list[int], start: int = 0, parent: bytes = b"") -> ChunkHeader:
        header = new_header(GEOMETRY, ids, start)
        header.parent_prefix_hash = parent
        return header

    def fill(self, reserved: ReserveResult, ids: list[int], session: Session | None = None) -> tuple[bytes, int]:
        """Write the payload that belongs to a reservation's tokens; return an item for Commit."""
        staging = (session or self.session).staging
        assert staging is not None
        assert reserved.staged is not None
        with staging.view(reserved.staged) as view:
            view[:] = payload_of(ids, len(view))
            return reserved.reservation_id, keys.checksum(view)

    async def put(
        self, ids: list[int], start: int = 0, parent: bytes = b"", salt: bytes = b"", session: Session | None = None
    ) -> tuple[bytes, int]:
        """Store a chunk; return its prefix hash and the outcome of the commit."""
        session = session or self.session
        reserved = self.store.reserve(session, salt, [self.header(ids, start, parent)])[0]
        assert reserved.outcome == pb.RESERVE_OUTCOME_GRANTED, pb.ReserveOutcome.Name(reserved.outcome)
        outcomes = await self.store.commit(session, self.store.epoch, [self.fill(reserved, ids, session)])
        return reserved.prefix_hash, outcomes[0]

    async def found(self, ids: list[int], salt: bytes = b"", session: Session | None = None) -> int:
        """Match a prompt, check every byte of whole chunks, and release; return the number of found tokens."""
        session = session or self.session
        result = await self.store.match(session, salt, keys.token_bytes(ids))
        at = 0
        for m in result.matches:
            assert m.chunk.slot is not None
            if m.tokens == m.chunk.tokens:
                view = self.store.arena.read(m.chunk.slot)
                assert view == payload_of(ids[at : at + m.tokens], len(view)), "the bytes are not those of the tokens"
            at += m.tokens
        self.store.release(session, [result.lease_id])
        return at


@asynccontextmanager
async def opened(
    arena_bytes: int = 10 * 4096,
    budget_bytes: int = 1 << 20,
    *,
    tier: DurableTier | None = None,
    new_policy: Callable[[], EvictionPolicy] = POLICIES[DEFAULT],
    limits: dict[bytes, TenantLimits] | None = None,
    staging_bytes: int = 1 << 20,
    clock: FakeClock | None = None,
    remote: RemoteSettings | None = None,
    max_index_bytes: float = inf,
    gpu_arena: GpuArena | None = None,
) -> AsyncIterator[Bench]:
    """Run a store while the ``with`` block runs, then check its invariants. No lease may remain at the end.

    ``limits`` has a tenant's limits by the salt.
    """
    by_id = {keys.tenant_id(salt): of for salt, of in (limits or {}).items()}
    clock, faulty = clock or FakeClock(), FaultyTier(tier or MemoryTier())
    store = ChunkStore(
        MemoryArena(arena_bytes),
        faulty,
        StoreConfig(new_policy, budget_bytes, staging_bytes, max_index_bytes, clock=clock),
        accounts=TenantAccounts(lambda account: by_id.get(account, TenantLimits())),
        remote=remote,
        gpu_arena=gpu_arena,
    )
    await store.start()
    try:
        yield Bench(store, faulty, clock)
        store.check_integrity()
    finally:
        faulty.let_go()
        await store.close()
