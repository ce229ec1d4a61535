"""A disk that hangs without an error: told, survived by the part in memory, and no reason not to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.condition_wait import until_async
from benchmarks.node import Node
from cache_daemon.durable import group_commit_writer
from cache_daemon.store import shutdown
from tests.cache_daemon.conftest import Peer
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.stores import Bench, opened

SLOT = 4096
# The daemon with times that a test can wait for, whose first write never ends.
HUNG = """
import sys, threading
from cache_daemon.durable import group_commit_writer
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.observability import tier_health as health
from cache_daemon.store import shutdown
group_commit_writer.HUNG_SECONDS = 0.3
shutdown.SECONDS, shutdown.SETTLE_SECONDS, shutdown.WRITE_SECONDS = 2.0, 1.0, 1.5
apply = LmdbTier.apply
def hangs(tier, group):
    if group.put:
        with tier._writing:
            threading.Event().wait()
    return apply(tier, group)
LmdbTier.apply = hangs
from cache_daemon.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


async def put(bench: Bench, number: int) -> bool:
    return (await bench.put([number * 100 + n for n in range(16)]))[1] == pb.COMMIT_OUTCOME_COMMITTED


async def test_commits_go_on_beside_a_disk_that_hangs_and_are_durable_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_commit_writer, "HUNG_SECONDS", 0.3)
    async with opened(arena_bytes=16 * SLOT, tier=MemoryTier()) as bench:
        bench.tier.hold()
        assert await put(bench, 0)
        await until_async(lambda: bench.tier.wait_until_held(0))  # the group that hangs has one chunk; the others queue
        for number in range(1, 16):
            assert await put(bench, number)
        await until_async(lambda: bench.store.stats().durable_failing != "")
        await until_async(lambda: bench.store.tiers.writer is not None and bench.store.tiers.writer.pending <= 1)
        assert "the disk hangs" in bench.store.stats().durable_failing
        for number in range(16, 48):
            assert await put(bench, number), "what waited for the disk made room"
        assert await bench.found([47 * 100 + n for n in range(16)]) == 16
        bench.tier.let_go()
        await until_async(lambda: not bench.store.stats().durable_failing)
        assert await put(bench, 99)
        await until_async(lambda: bench.store.stats().durable_chunks >= 15)
        await bench.store.settle()


async def test_a_store_whose_disk_hangs_closes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SECONDS", 1.0), ("SETTLE_SECONDS", 0.4), ("WRITE_SECONDS", 0.7)):
        monkeypatch.setattr(shutdown, name, seconds)
    async with opened(tier=MemoryTier()) as bench:
        bench.tier.hold()
        await put(bench, 1)
        await until_async(lambda: bench.tier.wait_until_held(0))
        began = time.monotonic()
        await bench.store.close()
        assert time.monotonic() - began < 5
        bench.tier.let_go()


def test_times_of_the_end_are_those_that_the_documents_name() -> None:
    assert (group_commit_writer.HUNG_SECONDS, shutdown.SECONDS) == (10.0, 20.0)
    assert shutdown.SETTLE_SECONDS < shutdown.WRITE_SECONDS < shutdown.SECONDS


def test_a_daemon_whose_disk_hangs_says_so_and_ends() -> None:
    class Hung(Node):
        launch = staticmethod(
            lambda command, environment, log: subprocess.Popen(
                [sys.executable, "-c", HUNG, *command[1:]], stdout=log, stderr=log, env=environment
            )
        )

    with Hung(workers=0, arena_bytes="4MiB", daemon_flags={"log_level": "info"}) as node:
        peer = Peer(node)
        peer.put(list(range(16)))
        deadline = time.monotonic() + 60
        while not peer.stats().durable_failing:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert peer.read(list(range(16))) == 16
        peer.close()
        began = time.monotonic()
        node.kill("daemon", signal.SIGTERM)
        assert time.monotonic() - began < 10
        assert "the daemon ends without waiting for its disk" in node.read_log()
