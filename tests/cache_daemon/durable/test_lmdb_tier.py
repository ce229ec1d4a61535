"""What the store on disk keeps, and in which order it gives it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, ReadJob, ReadResult, WriteGroup
from cache_daemon.durable.lmdb_tier import LmdbTier
from tests.cache_daemon.durable.chunks import BUDGET, chain, chunk, is_sound, key_of, opened, read, store

STORED, PARENT_MISSING = PutOutcome.STORED, PutOutcome.PARENT_MISSING


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[LmdbTier]:
    tier = opened(tmp_path / "store")
    yield tier
    tier.close()


def test_what_was_stored_is_there_after_opening_again(tmp_path: Path) -> None:
    puts = chain(5)
    tier = opened(tmp_path)
    assert store(tier, *puts) == [STORED] * 5
    tier.close()
    tier = LmdbTier(tmp_path, BUDGET)
    assert [loaded.header for loaded in tier.load()] == [put.header for put in puts]
    assert read(tier, *puts) == [ReadResult.OK] * 5
    tier.close()


def test_payloads_of_every_size_come_back(tier: LmdbTier) -> None:
    puts = [
        chunk([size], payload=bytes(size % 251 for _ in range(size))) for size in (1, 100, 2047, 2048, 4080, 70_001)
    ]
    store(tier, *puts)
    assert read(tier, *puts) == [ReadResult.OK] * len(puts)


def test_a_chunk_without_its_parent_is_refused_alone(tier: LmdbTier) -> None:
    first, second, third = chain(3)
    assert store(tier, second, first) == [PARENT_MISSING, STORED]
    assert store(tier, second, third) == [STORED, STORED]


def test_removing_a_chunk_takes_its_descendants_along(tier: LmdbTier) -> None:
    puts = chain(4)
    store(tier, *puts)
    tier.apply(WriteGroup(remove=(key_of(puts[1]),)))
    assert read(tier, *puts) == [ReadResult.OK, *[ReadResult.MISSING] * 3]
    assert tier.usage().entries == 1


def test_a_chunk_that_its_own_group_replaces_has_a_parent(tier: LmdbTier) -> None:
    first = chunk([1])
    old = chunk([2], first)
    new = chunk([2, 3], first, replaces=(key_of(old),))
    assert store(tier, first, old, new) == [STORED, PutOutcome.REPLACED, STORED]
    assert read(tier, old, new) == [ReadResult.MISSING, ReadResult.OK]
    without = chunk([7], chunk([8]))
    assert store(tier, without, chunk([9], replaces=(key_of(without),))) == [PARENT_MISSING, STORED]


def test_a_superseded_chunk_goes_only_when_its_successor_is_stored(tier: LmdbTier) -> None:
    old = chunk([1, 2])
    store(tier, old)
    orphan = chunk([9], chunk([8]), replaces=(key_of(old),))
    assert store(tier, orphan) == [PARENT_MISSING]
    assert is_sound(tier, old)
    new = chunk([1, 2, 3], replaces=(key_of(old),))
    assert store(tier, new) == [STORED]
    assert read(tier, old, new) == [ReadResult.MISSING, ReadResult.OK]


def test_chunks_are_loaded_parents_first_and_otherwise_the_longest_unused_first(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    left, right = chain(2, seed=1), chain(2, seed=2)
    store(tier, *left, *right)
    ticks = {key_of(left[0]): 30, key_of(left[1]): 10, key_of(right[0]): 20, key_of(right[1]): 40}
    tier.apply(WriteGroup(used=ticks))
    tier.close()
    tier = LmdbTier(tmp_path, BUDGET)
    loaded = list(tier.load())
    assert [entry.header.prefix_hash for entry in loaded] == [key_of(p) for p in (right[0], left[0], left[1], right[1])]
    assert [entry.last_use for entry in loaded] == [20, 30, 10, 40]
    tier.close()


def test_notes_survive_and_can_be_removed(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.apply(WriteGroup(notes={b"verdict": b"passed", b"pin": b""}))
    tier.apply(WriteGroup(notes={b"verdict": None}))
    tier.close()
    tier = opened(tmp_path)
    assert tier.notes() == {b"pin": b""}
    tier.close()


def test_unknown_fields_are_not_stored(tier: LmdbTier) -> None:
    put = chunk([1])
    header = ChunkHeader.FromString(put.header.SerializeToString() + b"\xfa\x3e\x03abc")
    assert len(header.SerializeToString()) > len(put.header.SerializeToString())
    put.header.CopyFrom(header)
    store(tier, put)
    found = tier.header(key_of(put))
    assert found is not None
    assert found.SerializeToString() == chunk([1]).header.SerializeToString()


def test_a_payload_that_is_not_the_headers_is_not_stored(tier: LmdbTier) -> None:
    good, changed = chunk([1]), chunk([2], payload=bytearray(256))  # type: ignore[arg-type]
    changed.payload[7] = 1
    assert store(tier, changed, good) == [PutOutcome.CORRUPT, STORED]


def test_the_budget_means_the_file(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for i in range(10):
        store(tier, *chain(50, seed=i))
    usage = tier.usage()
    tier.close()
    environment = lmdb.open(str(tmp_path), max_dbs=5, readonly=True, lock=False)
    pages = environment.info()["last_pgno"] + 1
    environment.close()
    assert 0.85 < usage.live_bytes / (pages * 4096) < 1.15
    assert usage.live_bytes > 1.5 * 500 * 16 * 128, "payloads of 2 KiB take a page each"


def test_reading_never_raises_for_one_jobs_sake(tier: LmdbTier) -> None:
    put = chunk([1, 2, 3])
    store(tier, put)
    short = ReadJob(key_of(put), memoryview(bytearray(5)), put.header.checksum)
    other = ReadJob(key_of(put), memoryview(bytearray(put.header.payload_bytes)), put.header.checksum ^ 1)
    unknown = ReadJob(b"x" * 32, memoryview(bytearray(5)), 0)
    assert tier.read([short, other, unknown]) == [ReadResult.CORRUPT, ReadResult.CORRUPT, ReadResult.MISSING]
    assert tier.read([]) == []
    assert is_sound(tier, put)


def test_readers_beside_a_writer_see_their_chunk_or_none(tier: LmdbTier) -> None:
    """Pages are used again all the time here, and compacted away; nobody ever reads another chunk's bytes."""
    puts = [chunk([i], payload=bytes([i]) * 9_000) for i in range(40)]
    stop = threading.Event()
    seen: list[set[ReadResult]] = [set() for _ in range(3)]

    def watch(found: set[ReadResult]) -> None:
        while not stop.is_set():
            found.update(read(tier, *puts))

    threads = [threading.Thread(target=watch, args=(found,)) for found in seen]
    for thread in threads:
        thread.start()
    round_, deadline = 0, time.monotonic() + 60
    while round_ < 60 or (min(map(len, seen)) < 2 and time.monotonic() < deadline):  # as long as one has seen nothing
        tier.apply(
            WriteGroup(remove=tuple(key_of(p) for p in puts[round_ % 4 :: 4]), put=tuple(puts[(round_ + 2) % 4 :: 4]))
        )
        if round_ % 20 == 19:
            tier.compact()
        round_ += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert seen == [{ReadResult.OK, ReadResult.MISSING}] * 3


def test_a_store_in_use_is_refused(tier: LmdbTier, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="another daemon uses the store"):
        LmdbTier(tmp_path / "store", BUDGET)


@pytest.mark.parametrize("version", [b"1", b"99"])
def test_a_store_of_another_format_is_refused_with_what_to_do(tmp_path: Path, version: bytes) -> None:
    environment = lmdb.open(str(tmp_path), max_dbs=3, lock=False)
    with environment.begin(write=True) as txn:
        txn.put(b"format", version, db=environment.open_db(b"meta", txn=txn))
    environment.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(StoreUnavailable, match=f"has format version '{version.decode()}'.*remove the folder or choose"):
        LmdbTier(tmp_path, BUDGET)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_another_programs_lmdb_file_is_refused(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), lock=False)
    with environment.begin(write=True) as txn:
        txn.put(b"their", b"data")
    environment.close()
    with pytest.raises(StoreUnavailable, match="another program's data"):
        LmdbTier(tmp_path, BUDGET)


def test_a_file_of_lmdb_1_is_refused(tmp_path: Path) -> None:
    if int(lmdb.__version__.split(".")[0]) < 3:
        pytest.skip("this py-lmdb has no LMDB 1.0")
    environment = lmdb.open(str(tmp_path), lock=False, lib_version=1)
    with environment.begin(write=True) as txn:
        txn.put(b"a", b"b")
    environment.close()
    with pytest.raises(StoreUnavailable, match="LMDB data format"):
        LmdbTier(tmp_path, BUDGET)


def test_a_smaller_budget_shrinks_the_file(tmp_path: Path) -> None:
    tier = opened(tmp_path, 32 << 20, compression="none")
    puts = [chunk([i], payload=bytes([i]) * 400_000) for i in range(50)]
    store(tier, *puts)
    tier.close()
    assert (tmp_path / "data.mdb").stat().st_size > 20_000_000
    small = 4 << 20
    tier = opened(tmp_path, small)
    tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts[5:])))
    tier.compact()
    assert tier.usage().file_bytes <= 1.5 * small
    assert read(tier, *puts[:5]) == [ReadResult.OK] * 5
    assert store(tier, chunk([99])) == [STORED]
    tier.close()


def test_a_wasteful_file_is_compacted_at_start(tmp_path: Path) -> None:
    tier = opened(tmp_path, 32 << 20, compression="none")
    puts = [chunk([i], payload=bytes([i]) * 400_000) for i in range(50)]
    store(tier, *puts)
    tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts[5:]), used={key_of(puts[0]): 7}))
    tier.close()
    tier = LmdbTier(tmp_path, 4 << 20)
    loaded = {entry.header.prefix_hash: entry.last_use for entry in tier.load()}
    assert loaded == {key_of(put): 7 * (put is puts[0]) for put in puts[:5]}
    assert tier.usage().file_bytes < 6 << 20
    assert read(tier, *puts[:5]) == [ReadResult.OK] * 5
    tier.close()


def test_what_a_rebuild_left_behind_by_dying_is_cleared(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put = chunk([1])
    store(tier, put)
    tier.close()
    (tmp_path / "data.mdb.rebuild").mkdir()
    (tmp_path / "data.mdb.rebuild" / "data.mdb").write_bytes(b"half of a file")
    tier = opened(tmp_path)
    assert is_sound(tier, put)
    assert not (tmp_path / "data.mdb.rebuild").exists()
    tier.close()


def test_a_folder_of_something_else_keeps_its_own_rebuild(tmp_path: Path) -> None:
    (tmp_path / "rebuild").mkdir()
    (tmp_path / "rebuild" / "theirs.txt").write_text("x")
    tier = opened(tmp_path)
    store(tier, chunk([1]))
    tier.compact()
    tier.close()
    assert (tmp_path / "rebuild" / "theirs.txt").read_text() == "x"
