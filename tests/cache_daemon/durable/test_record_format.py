"""What is read from a store is what was written for its key, and what was removed is not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from kvsidecar import keys

from cache_daemon.durable.durable_tier import ReadResult, WriteGroup
from cache_daemon.durable.encryption import NullCipher
from cache_daemon.durable.lmdb_file import PageFile
from cache_daemon.durable.record_format import CorruptRecord, Record, decrypt_header, encrypt_header
from cache_daemon.durable.store_scan import strict_scan
from tests.cache_daemon.durable.chunks import chunk, key_of, opened, read, store


def test_a_header_whose_hash_is_not_that_of_its_tokens_is_refused() -> None:
    header = chunk([1, 2, 3]).header
    key = header.prefix_hash
    assert decrypt_header(NullCipher(), key, Record(0, 1, 0, 0, encrypt_header(NullCipher(), header))) == header
    header.token_ids[0] = 9
    assert header.prefix_hash == key != keys.prefix_hash(header.parent_prefix_hash, header.token_ids[:])
    with pytest.raises(CorruptRecord, match="another chunk"):
        decrypt_header(NullCipher(), key, Record(0, 1, 0, 0, encrypt_header(NullCipher(), header)))


def test_a_removed_chunk_leaves_nothing_in_any_database(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    gone, kept = chunk([1, 2, 3]), chunk([4, 5, 6])
    store(tier, gone, kept)
    tier.apply(WriteGroup(remove=(key_of(gone),)))
    tier.close()
    scan = strict_scan(PageFile(tmp_path / "data.mdb"))
    assert set(scan.places) == set(scan.records) == {key_of(kept)}


def test_a_disk_that_cannot_be_read_now_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, one = opened(tmp_path), chunk([1, 2, 3])
    store(tier, one)

    def failing(self: PageFile, target: memoryview, offset: int) -> bool:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(PageFile, "read_into", failing)
        assert read(tier, one) == [ReadResult.FAILED]
    assert read(tier, one) == [ReadResult.OK]
    tier.close()
