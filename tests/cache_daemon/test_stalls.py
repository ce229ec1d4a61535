"""The longest that any allowed request keeps the event loop, and the limits on what is allowed.

The real service on a real socket, in this process, so that a store of 100,000 chunks is made in seconds. A stall is the
processor time of the loop's thread in one turn of the loop: on a machine of its own that is how long everybody waits,
and on one that others use too it is not spoiled by them. What is allowed is 50 ms, times how much slower a fixed piece
of Python is now than where that was set.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.chunk_layout import new_header

from benchmarks.peer import GEOMETRY, descriptor
from cache_daemon.auth.principal import OPERATOR
from cache_daemon.auth.tenant_limits import TenantLimits
from cache_daemon.eviction.gittins import Gittins
from cache_daemon.memory.arena import HostArena
from cache_daemon.memory.shared_memory import SharedMemory
from cache_daemon.rpc import request_validation
from cache_daemon.rpc.cache_service import CacheService, add_to_server
from cache_daemon.rpc.servicer_base import ServiceState
from cache_daemon.store.bloom_filter import SUMMARY_BYTES, CountingBloomFilter
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.store_config import StoreConfig
from cache_daemon.store.tenant_accounts import TenantAccounts

pytestmark = pytest.mark.alone

ALLOWED_MS = 50.0
CHUNKS = 100_000
# A pure Python loop that takes so long on the machine that the limit was set on.
REFERENCE_SECONDS = 0.05


def slowness() -> float:
    """How much slower than the reference this machine is now; at least 1."""

    def loop() -> float:
        began, found = time.thread_time(), {}
        for n in range(300_000):
            found[n & 1023] = n * 3
        return time.thread_time() - began

    return max(1.0, sorted(loop() for _ in range(5))[2] / REFERENCE_SECONDS)


@dataclass
class Bench:
    """A store behind a listener, and a clock that the test can advance."""

    store: ChunkStore
    address: str
    passed: float = 0.0
    session: Any = None
    ttl: float | None = None
    root: bytes = field(default_factory=lambda: keys.tenant_root(keys.namespace_id(descriptor()), b""))

    def add(self, parent: Chunk | None, ids: bytes, root: bytes = b"") -> Chunk:
        """Add a chunk to the index as a commit does, but without a payload."""
        tiers, root = self.store.tiers, root or self.root
        header = new_header(GEOMETRY, memoryview(ids).cast("I").tolist(), parent.end_position if parent else 0)
        header.ClearField("token_ids")
        header.root, header.tenant = root, keys.tenant_id(b"")
        header.parent_prefix_hash = parent.key if parent is not None else root
        header.prefix_hash = keys.prefix_hash(header.parent_prefix_hash, ids)
        header.content_hash = keys.content_hash(root, ids)
        account = self.store.accounts.account_of(header.tenant)
        slot = tiers.take_slot(header.payload_bytes, account)
        assert slot is not None
        chunk = Chunk(header, ids, account, slot, arena_state=Residency.PRESENT, last_used_at=tiers.clock())
        tiers.index_chunk(chunk)
        return chunk

    def star(self, count: int, root: bytes = b"") -> Chunk:
        """Add one chunk with ``count`` children."""
        first = self.add(None, keys.token_bytes([1 << 20]), root)
        for n in range(count):
            self.add(first, keys.token_bytes([n]), root)
        return first

    def chain(self, tokens: int, each: int) -> None:
        """Add the chunks of one long prompt, ``0, 1, 2, …``."""
        parent = None
        for at in range(0, tokens, each):
            parent = self.add(parent, keys.token_bytes(list(range(at, at + each))))


@asynccontextmanager
async def opened(folder: Path, arena_bytes: int = 512 << 20) -> AsyncIterator[Bench]:
    summary = SharedMemory("summary", SUMMARY_BYTES, writable_by_others=False)
    bench = Bench.__new__(Bench)
    Bench.__init__(bench, None, f"unix:{folder / 's'}")  # type: ignore[arg-type]
    accounts = TenantAccounts(lambda _: TenantLimits(ttl_seconds=bench.ttl))
    bench.store = ChunkStore(
        HostArena(arena_bytes), None, StoreConfig(Gittins, 0, 16 << 20, clock=lambda: 1e9 + bench.passed),
        accounts=accounts, bloom_filter=CountingBloomFilter(summary.memory),
    )  # fmt: skip
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    add_to_server(CacheService(ServiceState(bench.store, 60_000), lambda _: OPERATOR, "none"), server)
    server.add_insecure_port(bench.address)
    await bench.store.start()
    await server.start()
    described = descriptor()
    bench.session = bench.store.open_session("s", described, keys.namespace_id(described))
    bench.session.owner = OPERATOR
    try:
        yield bench
    finally:
        await server.stop(None)
        await bench.store.close()
        summary.close()


@asynccontextmanager
async def measured() -> AsyncIterator[list[float]]:
    """The processor time of each turn of the loop meanwhile, in milliseconds."""
    loop: Any = asyncio.get_running_loop()
    turn, turns = loop._run_once, []

    def timed() -> None:
        began = time.thread_time()
        turn()
        turns.append((time.thread_time() - began) * 1e3)

    gc.collect()
    loop._run_once = timed
    try:
        yield turns
        await asyncio.sleep(0.1)  # what a call leaves to be done after it
    finally:
        del loop._run_once


async def stall_of(bench: Bench, method: str, request: Any) -> tuple[float, Any]:
    """The longest turn while a call is served, and the call's answer."""

    def call() -> Any:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(bench.address, options=options) as channel:
            return getattr(CacheServiceStub(channel), method)(request, timeout=60)

    async with measured() as turns:
        answer = await asyncio.to_thread(call)
    return max(turns), answer


MILLION = list(range(request_validation.MAX_TOKENS))
# A call and its request, of the store and what was made in it.
Asked = tuple[str, Callable[[Bench, Any], Any]]


def prefix(bench: Bench, key: bytes = b"") -> pb.PrefixRef:
    return pb.PrefixRef(root=bench.root, prefix_hash=key)


def probes(bench: Bench, _: Any) -> pb.MatchRequest:
    """A prompt that is nowhere stored as a prefix, and all of it by content."""
    each = request_validation.MAX_TOKENS // request_validation.MAX_PROBES
    found = [pb.ContentProbe(start=1 + n * each, tokens=each) for n in range(request_validation.MAX_PROBES - 1)]
    return pb.MatchRequest(session_id=bench.session.id, token_ids=[5, *MILLION[:-1]], contents=found)


def many_tenants(bench: Bench) -> None:
    for n in range(CHUNKS // 4):
        bench.star(1, n.to_bytes(32, "big"))


def watched(bench: Bench) -> Chunk:
    first = bench.star(12_000)
    for chunk in list(bench.store.tiers.index):
        bench.store.tiers.emit(pb.EVENT_TYPE_COMMITTED, chunk)
    return first


# What is stored, and what is asked of it, one after the other.
CASES: dict[str, tuple[Callable[[Bench], Any], dict[str, Asked]]] = {
    "a prompt of 2^20 tokens": (
        lambda b: b.chain(request_validation.MAX_TOKENS, 128),
        {
            "matching it": ("Match", lambda b, _: pb.MatchRequest(session_id=b.session.id, token_ids=MILLION)),
            "matching another": (
                "Match",
                lambda b, _: pb.MatchRequest(session_id=b.session.id, token_ids=MILLION[::-1]),
            ),
            "a probe": ("Match", lambda b, _: pb.MatchRequest(namespace=b.session.namespace, token_ids=MILLION)),
        },
    ),
    "a prompt of 2^20 tokens in larger chunks": (
        lambda b: b.chain(request_validation.MAX_TOKENS, 256),
        {"4096 content probes": ("Match", probes)},
    ),
    "a prompt that is stored one token at a time": (
        lambda b: b.chain(CHUNKS, 1),
        {
            "matching it": ("Match", lambda b, _: pb.MatchRequest(session_id=b.session.id, token_ids=MILLION)),
            "deleting it": ("Delete", lambda b, _: pb.DeleteRequest()),
        },
    ),
    "a chunk that 100,000 continue": (
        lambda b: b.star(CHUNKS),
        {
            "a page": ("List", lambda b, _: pb.ListRequest(page_size=1000)),
            "a tenant's statistics": ("Stats", lambda b, _: pb.StatsRequest(namespace=b.session.namespace)),
            "all statistics": ("Stats", lambda b, _: pb.StatsRequest()),
            "a verdict": (
                "SetVerdict",
                lambda b, _: pb.SetVerdictRequest(
                    session_id=b.session.id, verdict=pb.ReuseVerdict(strategy="x" * 4000, passed=True)
                ),
            ),
            "deleting it": ("Delete", lambda b, first: pb.DeleteRequest(prefix=prefix(b, first.key))),
        },
    ),
    "a tenant of 100,000 chunks": (
        lambda b: b.star(CHUNKS),
        {"deleting it": ("Delete", lambda b, _: pb.DeleteRequest(prefix=prefix(b)))},
    ),
    "25,000 tenants": (many_tenants, {"a page": ("List", lambda b, _: pb.ListRequest(page_size=1000))}),
    "nothing": (
        lambda b: None,
        {
            "reserving 1024 headers": (
                "Reserve",
                lambda b, _: pb.ReserveRequest(
                    session_id=b.session.id,
                    headers=[new_header(GEOMETRY, [n] * 1024, 0) for n in range(request_validation.MAX_ITEMS)],
                ),
            )
        },
    ),
}


async def quietest(folder: Path, work: Callable[[Path], Awaitable[dict[str, float]]]) -> None:
    """Asserts that no piece of work keeps the loop longer than allowed. Other processes may be in the way: a stall of
    the work's own is there every time."""
    best: dict[str, float] = {}
    for attempt in range(3):
        place = folder / str(attempt)
        place.mkdir()
        found = await work(place)
        allowed = ALLOWED_MS * slowness()
        best = {what: min(ms / allowed, best.get(what, 99.0)) for what, ms in found.items()}
        if all(share <= 1 for share in best.values()):
            return
    too_long = [f"{what}: {share:.1f} times as long as is allowed" for what, share in best.items() if share > 1]
    raise AssertionError(f"the loop was kept by {'; '.join(too_long)}")


@pytest.mark.parametrize("stored", CASES)
async def test_no_request_keeps_the_loop_for_long(tmp_path: Path, stored: str) -> None:
    prepare, asked = CASES[stored]

    async def work(folder: Path) -> dict[str, float]:
        async with opened(folder) as bench:
            made = prepare(bench)
            gc.freeze()  # what was made here is not the request's to look through
            try:
                return {
                    what: (await stall_of(bench, method, request(bench, made)))[0]
                    for what, (method, request) in asked.items()
                }
            finally:
                gc.unfreeze()

    await quietest(tmp_path, work)


async def test_a_commit_of_1024_chunks_does_not_keep_the_loop(tmp_path: Path) -> None:
    async def work(folder: Path) -> dict[str, float]:
        async with opened(folder) as bench:
            headers = [new_header(GEOMETRY, [n], 0) for n in range(request_validation.MAX_ITEMS)]
            reserved = bench.store.reserve(bench.session, b"", headers)
            sum_of = keys.checksum(bytes(128))
            items = [pb.CommitItem(reservation_id=r.reservation_id, checksum=sum_of) for r in reserved]
            request = pb.CommitRequest(session_id=bench.session.id, epoch=bench.store.epoch, items=items)
            stall_ms, answer = await stall_of(bench, "Commit", request)
            assert answer.committed == request_validation.MAX_ITEMS
        return {"a commit": stall_ms}

    await quietest(tmp_path, work)


async def test_a_sweep_of_100_000_expired_chunks_does_not_keep_the_loop(tmp_path: Path) -> None:
    async def work(folder: Path) -> dict[str, float]:
        async with opened(folder) as bench:
            bench.ttl = 100.0
            bench.star(CHUNKS)
            bench.passed = 200.0
            async with measured() as turns:
                await bench.store.sweep()
            assert len(bench.store.tiers.index) == 0
        return {"a sweep": max(turns)}

    await quietest(tmp_path, work)


async def test_64_watchers_of_10_000_events_do_not_keep_the_loop(tmp_path: Path) -> None:
    async def work(folder: Path) -> dict[str, float]:
        async with opened(folder) as bench:
            watched(bench)
            request = pb.WatchRequest(epoch=bench.store.epoch, after_sequence=4_000)

            def watch() -> int:
                with grpc.insecure_channel(bench.address) as channel:
                    stub: Any = CacheServiceStub(channel)
                    calls = [stub.Watch(request, timeout=60) for _ in range(request_validation.MAX_WATCHERS)]
                    return sum(1 for call in calls for _ in zip(range(200), call, strict=False))

            async with measured() as turns:
                assert await asyncio.to_thread(watch) == 200 * request_validation.MAX_WATCHERS
        return {"watchers": max(turns)}

    await quietest(tmp_path, work)
