"""Stores that lost the pages that lead to their records: the search of all pages, and the choice of a transaction."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cache_daemon.durable.durable_tier import Put, ReadResult, WriteGroup
from cache_daemon.durable.lmdb_file import PageFile, database_of, leaf_nodes
from cache_daemon.durable.store_scan import lenient_scan
from tests.cache_daemon.durable.chunks import chain, chunk, key_of, opened, read, store
from tests.cache_daemon.durable.test_corruption import data, write_at


def lose_pages(folder: Path, *trees: bytes) -> None:
    """Overwrite the root pages of trees of the newest transaction; ``main`` lists the databases."""
    file = PageFile(data(folder))
    meta = file.metas()[0]
    roots = {b"main": meta.main.root, b"free": meta.free.root}
    for node in leaf_nodes(file.page(meta.main.root), meta.main.root):
        roots[node.key] = database_of(node).root
    for tree in trees:
        write_at(data(folder), roots[tree] * 4096, b"\xff" * 4096)


def two_transactions(folder: Path) -> tuple[list[Put], list[Put]]:
    """Make a store, and return the chunks of its last two transactions."""
    tier = opened(folder, strict=True)
    first, last = chain(30, seed=1), chain(20, seed=2)
    store(tier, *first)
    store(tier, *last)
    tier.close()
    return first, last


@pytest.mark.parametrize("tree", [b"main", b"meta"])
@pytest.mark.parametrize("remaining", [0, 30])
def test_a_damaged_page_does_not_undo_the_last_removal(tmp_path: Path, tree: bytes, remaining: int) -> None:
    tier = opened(tmp_path, strict=True)
    secret, other = chain(5, seed=1), chain(remaining, seed=2)
    store(tier, *secret)
    store(tier, *other)
    tier.apply(WriteGroup(remove=(key_of(secret[0]),)))
    tier.close()
    lose_pages(tmp_path, tree)
    tier = opened(tmp_path)
    assert read(tier, *secret) == [ReadResult.MISSING] * 5
    assert read(tier, *other) == [ReadResult.OK] * remaining
    tier.close()


@pytest.mark.parametrize("tree", [b"main", b"meta"])
def test_a_damaged_page_does_not_undo_the_last_stores(tmp_path: Path, tree: bytes) -> None:
    first, last = two_transactions(tmp_path)
    lose_pages(tmp_path, tree)
    tier = opened(tmp_path)
    assert read(tier, *first, *last) == [ReadResult.OK] * 50
    tier.close()


def test_equal_payloads_without_a_place_are_found_for_each_chunk(tmp_path: Path) -> None:
    """Two tenants with one prompt store the same bytes."""
    tier = opened(tmp_path, strict=True)
    puts = [chunk([1, 2], payload=b"equal" * 2000, root=bytes([n]) * 32) for n in range(3)]
    store(tier, *puts)
    tier.close()
    lose_pages(tmp_path, b"payloads")
    tier = opened(tmp_path)
    assert read(tier, *puts) == [ReadResult.OK] * 3
    tier.close()


def test_each_payload_without_a_place_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed payloads differ in length, and a page number does not tell which length a value has."""
    tier = opened(tmp_path, strict=True, compression="none")
    puts = [chunk([n], payload=random.Random(n).randbytes(40_000 + 7 * n)) for n in range(40)]
    store(tier, *puts)
    tier.close()
    lose_pages(tmp_path, b"payloads")
    read_bytes, read_into = 0, PageFile.read_into

    def counted(file: PageFile, target: memoryview, offset: int) -> bool:
        nonlocal read_bytes
        read_bytes += len(target)
        return read_into(file, target, offset)

    with monkeypatch.context() as counting:
        counting.setattr(PageFile, "read_into", counted)
        scan = lenient_scan(PageFile(data(tmp_path)))
    assert len(scan.places) == 40
    assert read_bytes <= sum(len(put.payload) for put in puts) + 40 * 4096
    tier = opened(tmp_path)
    assert read(tier, *puts) == [ReadResult.OK] * 40
    tier.close()


def test_going_back_to_an_older_transaction_is_logged(tmp_path: Path) -> None:
    first, last = two_transactions(tmp_path)
    lose_pages(tmp_path, b"free", b"main")
    with capture_logs() as logs:
        tier = opened(tmp_path)
    assert read(tier, *first, *last) == [ReadResult.OK] * 30 + [ReadResult.MISSING] * 20
    (repaired,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "is unreadable; the one before is used" in repaired["problems"][0]
    tier.close()


def test_a_meta_page_that_claims_to_be_the_newest_is_not_believed(tmp_path: Path) -> None:
    first, last = two_transactions(tmp_path)
    newest, older = PageFile(data(tmp_path)).metas()
    page = older.transaction % 2
    write_at(data(tmp_path), page * 4096 + 144, (newest.transaction + 1).to_bytes(8, "little"))
    assert PageFile(data(tmp_path)).metas()[0].main.root == older.main.root
    tier = opened(tmp_path)
    assert read(tier, *first, *last) == [ReadResult.OK] * 50
    tier.close()
