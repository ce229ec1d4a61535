"""The baselines of ``benchmarks.store`` read as many bytes as what they are compared with."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import store
from cache_daemon.durable.durable_tier import ReadResult


@pytest.mark.parametrize("size", [327_680, 1 << 21])
def test_plain_reads_are_of_as_many_bytes_as_those_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    header, chunks, sizes, preadv = SimpleNamespace(payload_bytes=size, prefix_hash=b"", checksum=0), 10, [], os.preadv
    tier = SimpleNamespace(
        load=lambda: [SimpleNamespace(header=header)] * chunks, read=lambda _: [ReadResult.OK], close=lambda: None
    )

    def counted(handle: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(preadv(handle, buffers, at))
        return sizes[-1]

    monkeypatch.setattr(store, "LmdbTier", lambda *_: tier)
    monkeypatch.setattr(store.page_cache, "drop", lambda: None)
    monkeypatch.setattr(store.os, "preadv", counted)
    (tmp_path / "data.mdb").write_bytes(bytes(size * chunks))
    store.cold(tmp_path, 1 << 30, {name: store.ArmTimes(name, size) for name in ("lmdb_cold", "pread_cold")}, chunks)
    assert sum(sizes) == size * chunks
