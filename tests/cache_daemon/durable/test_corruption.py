"""Stores that something else has changed: nothing wrong is read, nothing crashes, and what is sound is kept."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable import lmdb_tier
from cache_daemon.durable.durable_tier import PutOutcome, ReadResult, TierFailed, WriteGroup
from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.lmdb_file import PageFile
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.scrub import scrub
from cache_daemon.durable.store_scan import StoreScan
from cache_daemon.durable.tier_contents import TierContents, read_contents
from tests.cache_daemon.durable.chunks import BUDGET, chain, chunk, is_sound, key_of, opened, read, store
from tests.cache_daemon.durable.damage_child import CHAINS, LENGTH, stored_chains


def filled(folder: Path) -> list[list[object]]:
    """A store with a past: its free pages are full of old copies."""
    tier = opened(folder)
    chains = stored_chains()
    for puts in chains:
        store(tier, *puts)  # type: ignore[arg-type]
    tier.apply(WriteGroup(remove=tuple(key_of(puts[5]) for puts in chains[10:])))  # type: ignore[arg-type]
    for puts in chains[10:]:
        store(tier, *puts)  # type: ignore[arg-type]
    tier.apply(WriteGroup(notes={b"verdict": b"passed"}))
    tier.close()
    return chains


def data(folder: Path) -> Path:
    return folder / "data.mdb"


def write_at(file: Path, offset: int, content: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(content)


def make_unreadable(patch: pytest.MonkeyPatch, file: Path, page: int) -> None:
    """Let reads of one page of a file fail, as on a bad sector."""
    inode, pread, preadv = file.stat().st_ino, os.pread, os.preadv

    def check(handle: int, offset: int, size: int) -> None:
        if os.fstat(handle).st_ino == inode and offset < (page + 1) * 4096 and offset + size > page * 4096:
            raise OSError(errno.EIO, "Input/output error")

    def read_some(handle: int, size: int, offset: int) -> bytes:
        check(handle, offset, size)
        return pread(handle, size, offset)

    def read_into(handle: int, buffers: list[memoryview], offset: int) -> int:
        check(handle, offset, sum(map(len, buffers)))
        return preadv(handle, buffers, offset)

    patch.setattr(os, "pread", read_some)
    patch.setattr(os, "preadv", read_into)


@pytest.mark.parametrize("flips", [60, pytest.param(1500, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_flipped_bit_anywhere_neither_crashes_nor_lies(tmp_path: Path, flips: int) -> None:
    filled(tmp_path / "store")
    command = [sys.executable, "-m", "tests.cache_daemon.durable.damage_child", str(tmp_path / "store")]
    done = subprocess.run(
        [*command, str(tmp_path / "work"), "0", str(flips)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == flips
    assert not [f for f in found if f["signal"] or "error" in f]
    # A bit is one page's: a leaf has at most eleven headers here, each the parent of at most ten.
    assert all(f["sound"] >= CHAINS * LENGTH - 110 for f in found)
    assert sum(f["sound"] for f in found) > 0.99 * flips * CHAINS * LENGTH


def used_bytes(folder: Path) -> int:
    """The file's length without what is allocated ahead."""
    return PageFile(data(folder)).metas()[0].needed_bytes


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_salvaged_at_start(tmp_path: Path, share: float) -> None:
    chains = filled(tmp_path)
    size = int(used_bytes(tmp_path) * share)
    os.truncate(data(tmp_path), size)
    tier = opened(tmp_path)
    sound = sum(read(tier, *puts).count(ReadResult.OK) for puts in chains)  # type: ignore[arg-type]
    assert sound == tier.usage().entries, "what is listed can be read"
    assert share > 0.9 or sound < CHAINS * LENGTH, "nearly at the end there may be a free page"
    assert share < 0.9 or sound > 0
    assert store(tier, chunk([5, 5])) == [PutOutcome.STORED]
    tier.close()
    assert [path.stat().st_size for path in tmp_path.glob("data.mdb.damaged-*")] == ([size] if size else [])


def test_wherever_a_file_is_cut_off_it_is_salvaged(tmp_path: Path) -> None:
    """Also within a payload of several pages whose record was saved and whose place was lost."""
    tier, puts = opened(tmp_path / "whole"), []
    for n in range(30):
        puts.append(chunk([n], payload=random.Random(n).randbytes(20_000 + n % 3 * 4096)))
        store(tier, puts[-1])
        if n % 7 == 6:
            tier.apply(WriteGroup(remove=tuple(key_of(put) for put in puts[-5:-2])))
    tier.close()
    for cut in range(used_bytes(tmp_path / "whole") - 4096, 2 * 4096, -8192):
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        os.truncate(data(tmp_path / "cut"), cut)
        tier = opened(tmp_path / "cut")
        assert read(tier, *puts).count(ReadResult.OK) == tier.usage().entries
        tier.close()
        shutil.rmtree(tmp_path / "cut")


def test_a_file_truncated_under_the_tier_is_no_crash(tmp_path: Path) -> None:
    """Reads are by ``pread``: missing bytes are CORRUPT. Before LMDB writes, the file's length is checked."""
    filled(tmp_path)
    script = f"""
import os
from pathlib import Path
from tests.cache_daemon.durable.chunks import *
from tests.cache_daemon.durable.damage_child import stored_chains
from cache_daemon.durable.durable_tier import PutOutcome, ReadResult
folder = Path({str(tmp_path)!r})
tier = opened(folder)
os.truncate(folder / "data.mdb", 8192 * 16)
found = [result for puts in stored_chains() for result in read(tier, *puts)]
assert ReadResult.CORRUPT in found, found
assert set(found) <= {{ReadResult.CORRUPT, ReadResult.OK}}, found
assert store(tier, chunk([1, 2, 3])) == [PutOutcome.STORED]
assert is_sound(tier, chunk([1, 2, 3]))
tier.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_only_one_damaged_file_is_kept(tmp_path: Path) -> None:
    for expected in ("data.mdb.damaged-1", "data.mdb.damaged-2"):
        filled(tmp_path)
        os.truncate(data(tmp_path), used_bytes(tmp_path) // 2)
        opened(tmp_path).close()
        assert [path.name for path in tmp_path.glob("data.mdb.damaged-*")] == [expected]


@pytest.mark.parametrize("page", [0, 1])
def test_one_lost_meta_page_loses_at_most_the_last_transaction(tmp_path: Path, page: int) -> None:
    chains = filled(tmp_path)
    write_at(data(tmp_path), page * 4096, bytes(4096))
    tier = opened(tmp_path)
    assert all(read(tier, *puts) == [ReadResult.OK] * LENGTH for puts in chains)  # type: ignore[arg-type]
    tier.close()


def test_what_was_removed_does_not_come_back_through_salvage(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    secret = chain(30, seed=1)
    store(tier, *secret)
    tier.apply(WriteGroup(remove=(key_of(secret[0]),)))
    other = chain(30, seed=2)
    store(tier, *other)
    tier.close()
    environment = lmdb.open(str(tmp_path), max_dbs=5, readonly=True, lock=False)
    last = environment.info()["last_pgno"]
    environment.close()
    os.truncate(data(tmp_path), last * 4096)
    assert scrub(tmp_path, repair=True).sound > 0
    tier = opened(tmp_path)
    assert read(tier, *secret) == [ReadResult.MISSING] * 30
    assert ReadResult.OK in read(tier, *other)
    tier.close()


def test_a_damaged_header_goes_with_its_descendants(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    puts = chain(4)
    store(tier, *puts)
    tier.close()
    environment = lmdb.open(str(tmp_path), max_dbs=5, lock=False)
    with environment.begin(write=True, db=environment.open_db(b"headers")) as txn:
        value = bytearray(txn.get(key_of(puts[1])))
        value[60] ^= 1
        txn.put(key_of(puts[1]), bytes(value))
        commit = environment.open_db(b"meta", txn=txn)
        _number_commit(txn, commit)
    environment.close()
    tier = LmdbTier(tmp_path, BUDGET)
    assert [loaded.header for loaded in tier.load()] == [puts[0].header]
    assert (tier.load_report.corrupt, tier.load_report.orphaned) == (1, 2)
    assert tier.usage().entries == 1
    tier.close()
    tier = LmdbTier(tmp_path, BUDGET)
    assert len(list(tier.load())) == 1
    assert tier.load_report.corrupt == tier.load_report.orphaned == 0, "it was removed, not only skipped"
    tier.close()


def test_a_damaged_note_is_dropped_and_counted(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.apply(WriteGroup(notes={b"verdict": b"passed", b"other": b"x"}))
    tier.close()
    environment = lmdb.open(str(tmp_path), max_dbs=5, lock=False)
    with environment.begin(write=True, db=environment.open_db(b"notes")) as txn:
        value = bytearray(txn.get(b"verdict"))
        value[0] ^= 1
        txn.put(b"verdict", bytes(value))
        _number_commit(txn, environment.open_db(b"meta", txn=txn))
    environment.close()
    tier = opened(tmp_path)
    assert tier.notes() == {b"other": b"x"}
    assert tier.load_report.notes == 1
    tier.close()


def _number_commit(txn: lmdb.Transaction, meta: object) -> None:
    from cache_daemon.durable.record_format import META, checked

    txn.put(b"commit", checked(META, b"commit", txn.id().to_bytes(8, "little")), db=meta)


def test_a_damaged_payload_is_corrupt_and_the_rest_is_sound(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    first, second = chunk([1], payload=b"a" * 5000), chunk([2], payload=b"b" * 5000)
    store(tier, first, second)
    at = data(tmp_path).read_bytes().index(b"b" * 4000)
    write_at(data(tmp_path), at + 100, b"?")
    assert read(tier, first, second) == [ReadResult.OK, ReadResult.CORRUPT]
    tier.apply(WriteGroup(remove=(key_of(second),)))
    assert store(tier, second) == [PutOutcome.STORED]
    assert is_sound(tier, second)
    tier.close()


def test_pages_that_lmdb_would_free_wrongly_are_noticed_before(tmp_path: Path) -> None:
    """The number of a large value's pages is in its first; LMDB frees as many as it says."""
    tier = opened(tmp_path)
    puts = [chunk([i], payload=bytes([i + 1]) * 50_000) for i in range(6)]
    store(tier, *puts)
    at = data(tmp_path).read_bytes().index(b"\x03" * 4000)
    write_at(data(tmp_path), at - 4, (40).to_bytes(4, "little"))
    with pytest.raises(TierFailed, match="damaged"):
        tier.apply(WriteGroup(remove=(key_of(puts[2]),)))
    tier.apply(WriteGroup(remove=(key_of(puts[2]),)))
    assert read(tier, *puts).count(ReadResult.OK) == 5
    tier.close()


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    data(tmp_path).write_bytes(b"garbage" * 5000)
    with pytest.raises(StoreUnavailable, match=r"cannot open the store in .* is no store of this program"):
        LmdbTier(tmp_path, BUDGET)
    assert data(tmp_path).read_bytes() == b"garbage" * 5000


def test_a_file_of_zeros_as_after_a_power_cut_becomes_an_empty_store(tmp_path: Path) -> None:
    data(tmp_path).write_bytes(bytes(1 << 20))
    tier = opened(tmp_path)
    assert store(tier, chunk([1])) == [PutOutcome.STORED]
    tier.close()


def test_a_file_system_without_hard_links_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    filled(tmp_path)
    os.truncate(data(tmp_path), used_bytes(tmp_path) // 2)
    damaged = data(tmp_path).read_bytes()
    monkeypatch.setattr(os, "link", refuses)
    opened(tmp_path).close()
    kept = tmp_path / "data.mdb.damaged-1"
    assert kept.read_bytes() == damaged
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_store_that_is_opened_again_while_it_serves_leaves_garbage_collection_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []

    def noted(scan: StoreScan, cipher: Cipher) -> TierContents:
        collecting.append(gc.isenabled())
        return read_contents(scan, cipher)

    monkeypatch.setattr(lmdb_tier, "read_contents", noted)
    tier = opened(tmp_path)
    store(tier, *chain(2))
    os.truncate(data(tmp_path), used_bytes(tmp_path) // 2)
    tier.apply(WriteGroup(notes={b"n": b"v"}))
    tier.close()
    at_the_start, *again = collecting
    assert not at_the_start, "nothing else goes on then"
    assert again
    assert all(again)


def test_a_file_that_was_away_for_a_moment_is_written_again(tmp_path: Path) -> None:
    tier, first, second = opened(tmp_path), chunk([1]), chunk([2])
    store(tier, first)
    data(tmp_path).rename(tmp_path / "away")
    with pytest.raises(TierFailed, match="cannot be opened again"):
        store(tier, second)
    (tmp_path / "away").rename(data(tmp_path))
    assert store(tier, second) == [PutOutcome.STORED]
    assert read(tier, first, second) == [ReadResult.OK] * 2
    tier.close()


def test_a_file_that_failed_while_it_was_opened_again_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: LmdbTier) -> None:
        raise OSError(errno.EIO, "Input/output error")

    tier, first, second = opened(tmp_path), chunk([1]), chunk([2])
    store(tier, first)
    with monkeypatch.context() as failing:
        failing.setattr(LmdbTier, "_refresh_meta", fails)
        for reason in ("cannot be read", "cannot be opened again"):
            with pytest.raises(TierFailed, match=reason):
                store(tier, second)
    assert store(tier, second) == [PutOutcome.STORED]
    assert read(tier, first, second) == [ReadResult.OK] * 2
    tier.close()


def test_of_a_damaged_store_a_payload_that_cannot_be_read_is_lost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, puts = opened(tmp_path), [chunk([i], payload=bytes([i + 1]) * 50_000) for i in range(6)]
    store(tier, *puts)
    for value in (b"one", b"two"):  # both meta pages are of later transactions
        tier.apply(WriteGroup(notes={b"verdict": value}))
    tier.close()
    make_unreadable(monkeypatch, data(tmp_path), data(tmp_path).read_bytes().index(b"\x03" * 4000) // 4096 + 1)
    assert scrub(tmp_path, repair=False).corrupt == 1
    write_at(data(tmp_path), 0, bytes(4096))
    tier = opened(tmp_path)
    assert read(tier, *puts) == [ReadResult.MISSING if i == 2 else ReadResult.OK for i in range(6)]
    assert [path.name for path in tmp_path.glob("data.mdb.damaged-*")] == ["data.mdb.damaged-1"]
    tier.close()


def test_a_page_that_cannot_be_read_at_the_start_is_like_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = filled(tmp_path / "store")
    meta = PageFile(data(tmp_path / "store")).metas()[0]
    for page in (0, 1, meta.main.root, meta.free.root, *random.Random(3).sample(range(2, meta.last_page), 12)):
        shutil.copytree(tmp_path / "store", tmp_path / "work")
        with monkeypatch.context() as failing:
            make_unreadable(failing, data(tmp_path / "work"), page)
            tier = opened(tmp_path / "work")
            sound = sum(read(tier, *puts).count(ReadResult.OK) for puts in chains)  # type: ignore[arg-type]
            tier.close()
        assert sound >= CHAINS * LENGTH - 110, page
        shutil.rmtree(tmp_path / "work")
