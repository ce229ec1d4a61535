"""Memory of the index: chunks with small payloads take more heap than arena or disk."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.eviction_policies import POLICIES
from benchmarks.node import Node
from benchmarks.peer import Peer
from cache_daemon import capacity_check
from cache_daemon.auth.tenant_limits import Priority, TenantLimits
from cache_daemon.config import DaemonConfig
from tests.cache_daemon.diagnostics.test_miss_explainer import why
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened

PAGE = 4096
ONE_CHUNK = (8 << 10) + keys.TOKEN_BYTES
TEN_CHUNKS = 10 * ONE_CHUNK
FIRST = list(range(1000, 1032))


async def put(bench: Bench, *tokens: int, salt: bytes = b"") -> None:
    for token in tokens:
        assert (await bench.put([token], salt=salt))[1] == pb.COMMIT_OUTCOME_COMMITTED
        await bench.store.settle()


async def test_new_chunks_replace_old_chunks_when_the_index_is_full() -> None:
    async with opened(100 * PAGE, max_index_bytes=TEN_CHUNKS) as bench:
        await bench.put(FIRST)
        await put(bench, *range(30))
        assert len(bench.store.tiers.index) == 10
        assert await bench.found([29]) == 1
        assert bench.store.stats().durable_evictions == 21
        assert await why(bench, FIRST) == ("evicted", 0, "index")


async def test_tokens_count_as_memory_of_the_index() -> None:
    async with opened(100 * PAGE, max_index_bytes=TEN_CHUNKS) as bench:
        for i in range(20):
            await bench.put([i] * 1000)
            await bench.store.settle()
        assert len(bench.store.tiers.index) == TEN_CHUNKS // ((8 << 10) + 1000 * keys.TOKEN_BYTES) == 6


async def test_a_full_index_spares_chunks_of_higher_priority_and_of_byte_quotas() -> None:
    limits = {
        b"low": TenantLimits(priority=Priority.LOW),
        b"high": TenantLimits(priority=Priority.HIGH),
        b"own": TenantLimits(arena_bytes=50 * PAGE, store_bytes=50 * PAGE),
    }
    async with opened(100 * PAGE, max_index_bytes=TEN_CHUNKS, limits=limits) as bench:
        for salt in (b"high", b"own"):
            await put(bench, 1, 2, 3, salt=salt)
        await put(bench, *range(30), salt=b"low")
        for salt in (b"high", b"own"):
            assert [await bench.found([token], salt) for token in (1, 2, 3)] == [1, 1, 1]


async def test_an_index_full_of_chunks_in_use_refuses_new_chunks() -> None:
    async with opened(100 * PAGE, max_index_bytes=TEN_CHUNKS) as bench:
        await put(bench, *range(10))
        leases = [
            (await bench.store.match(bench.session, b"", keys.token_bytes([token]))).lease_id for token in range(10)
        ]
        assert (await bench.put([10]))[1] == pb.COMMIT_OUTCOME_ARENA_FULL
        bench.store.release(bench.session, leases[4:5])
        assert (await bench.put([10]))[1] == pb.COMMIT_OUTCOME_COMMITTED
        assert await bench.found([4]) == 0
        bench.store.release(bench.session, leases)


async def test_a_start_with_less_memory_keeps_the_chunks_of_the_last_use() -> None:
    tier = MemoryTier()
    async with opened(100 * PAGE, tier=tier) as bench:
        parent = b""
        for token in range(30):
            bench.clock.now += 1
            parent, _ = await bench.put([token], start=token, parent=parent)
        await put(bench, *range(100, 105))
    async with opened(100 * PAGE, tier=tier, new_policy=POLICIES["lru"], max_index_bytes=TEN_CHUNKS) as bench:
        assert len(bench.store.tiers.index) == 10
        assert [await bench.found([token]) for token in range(100, 105)] == [1] * 5
        assert await bench.found(list(range(30))) == 5
    assert len(tier.stored_keys()) == 10


def test_the_heap_of_a_daemon_does_not_grow_with_tiny_chunks() -> None:
    """The payloads of 5,000 chunks need 3 MB, and their heap 35 MB."""
    flags = {"index_bytes": "8MiB", "staging_bytes": "1MiB"}
    with Node(workers=0, arena_bytes="4MiB", daemon_flags=flags) as node:
        peer, daemon = Peer(node), psutil.Process(node.pid("daemon"))
        sizes = []
        for first in range(0, 5000, 250):
            made = peer.reserve(*(peer.header([first + i]) for i in range(250)))
            for reservation in made:
                peer.staged(reservation.staging)[:] = bytes(reservation.staging.size_bytes)
            peer.commit(*made)
            sizes.append(daemon.memory_full_info().uss)
        assert 800 < node.cache_stats().chunks <= 1024
        assert sizes[-1] - sizes[9] < 12 << 20
        peer.close()


@pytest.mark.parametrize(
    ("given", "limit", "expected"),
    [("0", 4 << 30, ((3 << 30) - (384 << 20)) // 4), ("0", 1 << 30, 64 << 20), ("2MiB", 4 << 30, 2 << 20)],
)
def test_the_default_is_quarter_of_the_memory_that_is_left(
    given: str, limit: int, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capacity_check, "memory_limit_bytes", lambda: limit)
    config = DaemonConfig(socket=tmp_path / "s", arena_bytes="1GiB", staging_bytes="256MiB", index_bytes=given)
    assert capacity_check.index_bytes(config) == expected


def test_an_index_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes is too small for an index; at least 1MiB is needed, or 0"):
        DaemonConfig(index_bytes=5)
