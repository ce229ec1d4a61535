"""A full map and a full disk: refused cleanly, removals still possible, and all is well when there is room again."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.durable_tier import OutOfSpace, Put, PutOutcome, ReadResult, TierFailed, WriteGroup
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.scrub import scrub
from tests.cache_daemon.durable.chunks import chunk, key_of, opened, read, store

STORED = PutOutcome.STORED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=False)


def fill(tier: LmdbTier, size: int = 30_000) -> list[Put]:
    """Chunks until there is no room."""
    stored: list[Put] = []
    while True:
        put = chunk([len(stored)], payload=random.Random(len(stored)).randbytes(size))
        try:
            store(tier, put)
        except OutOfSpace:
            assert stored
            return stored
        stored.append(put)


def test_a_full_map_refuses_chunks_and_never_removals(tmp_path: Path) -> None:
    budget = 2 << 20
    tier = opened(tmp_path, budget)
    puts = fill(tier)
    assert tier.usage().live_bytes > budget, "the map is not the limit before the budget is"
    for round_ in range(5):
        with pytest.raises(OutOfSpace):
            store(tier, chunk([10**6], payload=bytes(4 << 20)))
        gone, puts = puts[:8], puts[8:]
        tier.apply(WriteGroup(remove=tuple(key_of(put) for put in gone)))
        assert read(tier, *gone) == [ReadResult.MISSING] * 8
        fresh = chunk([10**6 + round_], payload=random.Random(round_).randbytes(30_000))
        assert store(tier, fresh) == [STORED]
        puts.append(fresh)
    assert read(tier, *puts) == [ReadResult.OK] * len(puts)
    tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts)))
    assert tier.usage().entries == 0
    assert tier.usage().file_bytes <= 1.5 * budget
    tier.close()


def test_a_refused_group_changes_nothing(tmp_path: Path) -> None:
    tier = opened(tmp_path, 1 << 20)
    puts = fill(tier)
    with pytest.raises(OutOfSpace):
        tier.apply(
            WriteGroup(
                remove=(key_of(puts[0]),),
                put=(chunk([7, 7], payload=bytes(3 << 20)),),
                notes={b"n": b"v"},
            )
        )
    assert read(tier, *puts) == [ReadResult.OK] * len(puts)
    assert tier.notes() == {}
    before = tier.usage()
    tier.close()
    tier = opened(tmp_path, 1 << 20)
    assert read(tier, *puts) == [ReadResult.OK] * len(puts)
    assert (tier.usage().entries, tier.usage().live_bytes) == (before.entries, before.live_bytes)
    tier.close()


def test_refusing_again_and_again_wears_nothing_out(tmp_path: Path) -> None:
    tier = opened(tmp_path, 1 << 20)
    put = chunk([1])
    for _ in range(10):
        with pytest.raises(OutOfSpace):
            store(tier, chunk([7], payload=random.Random(1).randbytes(3 << 20)))
    assert store(tier, put) == [STORED]
    tier.apply(WriteGroup(remove=(key_of(put),)))
    assert read(tier, put) == [ReadResult.MISSING]
    tier.close()


def test_the_file_stays_within_its_limit_while_chunks_come_and_go(tmp_path: Path) -> None:
    """The caller keeps the live bytes below the budget; sizes vary, so the file becomes fragmented."""
    budget, rng = 6 << 20, random.Random(3)
    tier = opened(tmp_path, budget)
    live: list[Put] = []
    refused = 0
    for i in range(400):
        put = chunk([i], payload=rng.randbytes(rng.randint(10_000, 120_000)))
        while tier.usage().live_bytes + 130_000 > 0.95 * budget:
            tier.apply(WriteGroup(remove=(key_of(live.pop(rng.randrange(len(live)))),)))
        try:
            store(tier, put)
            live.append(put)
        except OutOfSpace:
            refused += 1
    assert refused <= 4, "a quarter is enough for what is fragmented"
    assert tier.usage().file_bytes <= 1.5 * budget
    assert read(tier, *live) == [ReadResult.OK] * len(live)
    tier.close()


def test_a_full_disk_refuses_chunks_and_never_removals(small_disk: Path) -> None:
    tier = opened(small_disk / "store", 1 << 30)
    puts = fill(tier)
    for _ in range(3):
        with pytest.raises(OutOfSpace):
            store(tier, chunk([10**6], payload=bytes(900_000)))
    assert read(tier, *puts) == [ReadResult.OK] * len(puts)
    tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts[: len(puts) // 2])))
    tier.apply(WriteGroup(notes={b"n": b"v"}))
    again = [chunk([10**6 + i], payload=bytes([i]) * 30_000) for i in range(len(puts) // 4)]
    for put in again:
        assert store(tier, put) == [STORED]
    left = [*puts[len(puts) // 2 :], *again]
    assert read(tier, *left) == [ReadResult.OK] * len(left)
    tier.close()
    tier = opened(small_disk / "store", 1 << 30)
    assert read(tier, *left) == [ReadResult.OK] * len(left)
    tier.close()


def test_a_fragmented_store_on_a_full_disk_says_that_it_is_full(small_disk: Path) -> None:
    """What is free in the file lies in pieces then; LMDB lengthens the file, and calls what the disk refuses EIO."""
    tier = opened(small_disk / "store", 1 << 30)
    rng, live, refused, environment = random.Random(5), list[Put](), 0, tier._env
    for number in range(300):
        put = chunk([number], payload=rng.randbytes(rng.randint(4_000, 150_000)))
        try:
            store(tier, put)
            live.append(put)
        except OutOfSpace:
            refused += 1
            gone = [live.pop(rng.randrange(len(live))) for _ in range(1 + len(live) // 10)]
            tier.apply(WriteGroup(remove=tuple(key_of(one) for one in gone)))
    assert refused > 20
    assert tier._env is environment, "a chunk that does not fit is refused before LMDB fails to write it"
    assert read(tier, *live) == [ReadResult.OK] * len(live)
    tier.close()


def test_pages_that_the_last_transaction_freed_are_used_at_once(small_disk: Path) -> None:
    tier = opened(small_disk / "store", 1 << 30)
    puts = fill(tier)
    tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts)))
    one = chunk([10**6], payload=random.Random(1).randbytes(30_000 * len(puts) // 4))
    assert store(tier, one) == [STORED]
    tier.close()


def test_a_disk_that_others_have_filled_heals_when_they_leave(small_disk: Path) -> None:
    tier = opened(small_disk / "store", 1 << 30)
    first = chunk([1], payload=bytes(30_000))
    store(tier, first)
    hog = small_disk / "hog"
    with pytest.raises(OSError), hog.open("wb") as file:  # noqa: PT012
        while True:
            file.write(bytes(4096))
            file.flush()
    with pytest.raises(OutOfSpace):
        store(tier, chunk([2], payload=bytes(900_000)))
    tier.apply(WriteGroup(remove=(key_of(first),)))
    assert read(tier, first) == [ReadResult.MISSING]
    hog.unlink()
    assert store(tier, chunk([2], payload=bytes(900_000))) == [STORED]
    tier.close()


@pytest.mark.parametrize("by_command", [False, True])
def test_a_rebuild_without_room_gives_back_its_part(small_disk: Path, by_command: bool) -> None:
    """A compaction, and a repair by ``cache verify``: the disk is as full as before."""
    folder = small_disk / "store"
    tier = opened(folder, 1 << 30, compression="none")
    puts = fill(tier)
    if by_command:
        tier.close()
        at = (folder / "data.mdb").read_bytes().index(bytes(puts[0].payload))
        with (folder / "data.mdb").open("r+b") as file:
            file.seek(at)
            file.write(bytes(64))
        with pytest.raises(StoreUnavailable, match="cannot verify the store"):
            scrub(folder, repair=True)
    else:
        with pytest.raises(TierFailed, match="cannot be written"):
            tier.compact()
        assert read(tier, *puts) == [ReadResult.OK] * len(puts)
    assert not [path for path in folder.iterdir() if path.name not in ("data.mdb", "daemon.lock")]
    tier.close()
