"""kill -9 at any moment: what was reported durable is there, nothing is half there, nothing is wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cache_daemon.durable.durable_tier import ReadResult
from cache_daemon.durable.lmdb_tier import LmdbTier
from tests.cache_daemon.durable.chunks import BUDGET, chunk, is_sound, key_of, read

# Supersedes one chunk by the next for ever; prints the last that was reported durable.
_SUPERSEDE = """
import asyncio, sys
from pathlib import Path
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from tests.cache_daemon.durable.chunks import BUDGET, chunk, key_of

async def main():
    tier = LmdbTier(Path(sys.argv[1]), BUDGET)
    list(tier.load())
    writer = GroupCommitWriter(tier, asyncio.get_running_loop())
    before = ()
    for length in range(1, 100_000):
        put = chunk(list(range(length)), replaces=before, payload=bytes([length % 251]) * 20_000)
        done = asyncio.Event()
        def hear(result, length=length, done=done):
            print(length, result.outcome.value, flush=True)
            done.set()
        view = memoryview(bytes(put.payload))
        writer.put(put.header, lambda view=view: view, put.replaces, lambda: 0, hear)
        before = (key_of(put),)
        if length % 3:
            await done.wait()

asyncio.run(main())
"""


def superseding(length: int) -> object:
    return chunk(list(range(length)), payload=bytes([length % 251]) * 20_000)


@pytest.mark.parametrize("seed", range(6))
def test_superseding_never_loses_the_prefix(tmp_path: Path, seed: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERSEDE, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.readline()
    assert first == "1 stored\n", process.stderr.read()
    time.sleep(random.Random(seed).uniform(0.0, 0.6))
    process.kill()
    lines = process.stdout.read().split("\n")
    process.wait()
    process.stdout.close()
    process.stderr.close()
    reported = max([1, *(int(line.split()[0]) for line in lines if line.endswith("stored"))])
    tier = LmdbTier(tmp_path, BUDGET)
    loaded = list(tier.load())
    assert len(loaded) == 1, "one of old and new is there, never both, never none"
    length = len(loaded[0].header.token_ids)
    assert length >= reported
    assert is_sound(tier, superseding(length))  # type: ignore[arg-type]
    tier.close()


# Compacts for ever, with chunks coming and going between.
_COMPACT = """
import sys
from pathlib import Path
from cache_daemon.durable.durable_tier import WriteGroup
from tests.cache_daemon.durable.chunks import chunk, key_of, opened, store

tier = opened(Path(sys.argv[1]))
kept = [chunk([i], payload=bytes([i]) * 30_000) for i in range(20)]
store(tier, *kept)
print("ready", flush=True)
while True:
    extra = chunk([1000], payload=bytes(100_000))
    store(tier, extra)
    tier.apply(WriteGroup(remove=(key_of(extra),)))
    tier.compact()
"""


@pytest.mark.parametrize("seed", range(4))
def test_compacting_can_die_at_any_point(tmp_path: Path, seed: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _COMPACT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(random.Random(seed).uniform(0.0, 0.5))
    process.kill()
    process.wait()
    process.stdout.close()
    kept = [chunk([i], payload=bytes([i]) * 30_000) for i in range(20)]
    tier = LmdbTier(tmp_path, BUDGET)
    assert {key_of(put) for put in kept} <= {loaded.header.prefix_hash for loaded in tier.load()}
    assert read(tier, *kept) == [ReadResult.OK] * 20
    assert not (tmp_path / "data.mdb.rebuild").exists()
    assert not list(tmp_path.glob("data.mdb.damaged-*"))
    tier.close()
