"""Archives: what goes out comes in, and nothing that is not what it says does."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.errors import InvalidRequest

from cache_daemon.durable.archive import export_archive, import_archive
from cache_daemon.durable.durable_tier import DurableTier, Put, ReadResult, WriteGroup
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.durable.record_format import EXPIRY_NOTE_PREFIX, encode_expiry
from tests.cache_daemon.doubles.memory_tier import MemoryTier
from tests.cache_daemon.durable.chunks import BUDGET, ROOT, chain, chunk, key_of, opened, read, store

OTHER_ROOT = bytes(32)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    tier = opened(tmp_path / "store")
    store(tier, *chain(6), *chain(3, seed=9), chunk([1, 2, 3], root=OTHER_ROOT))
    export_archive(tier, tmp_path / "archive")
    tier.close()
    return tmp_path / "archive"


def test_what_goes_out_comes_in(archive: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    tier = opened(tmp_path / "other", key=b"k" * 32)
    done = import_archive(tier, archive, progress=lambda at, of: heard.append((at, of)))
    assert (done.chunks, done.skipped) == (10, 0)
    puts = [*chain(6), *chain(3, seed=9), chunk([1, 2, 3], root=OTHER_ROOT)]
    assert read(tier, *puts) == [ReadResult.OK] * 10
    assert heard
    tier.close()


def test_an_import_leaves_what_is_stored(archive: Path) -> None:
    tokens = chain(1)[0].header.token_ids
    tier, mine = MemoryTier(), chunk(tokens, payload=bytes(len(tokens) * 128))
    store(tier, mine)
    assert import_archive(tier, archive).chunks == 10
    assert read(tier, mine, chain(2)[1]) == [ReadResult.OK] * 2


def test_only_the_roots_asked_for_go_out(archive: Path, tmp_path: Path) -> None:
    tier = opened(tmp_path / "store")
    done = export_archive(tier, tmp_path / "one", frozenset([OTHER_ROOT]))
    tier.close()
    assert done.chunks == 1
    memory = MemoryTier()
    import_archive(memory, tmp_path / "one")
    assert [loaded.header.root for loaded in memory.load()] == [OTHER_ROOT]
    assert ROOT not in (tmp_path / "one").read_bytes()


def test_corrupt_chunks_and_their_children_stay_behind(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    puts = chain(4)
    store(tier, *puts)
    data = tmp_path / "data.mdb"
    at = data.read_bytes().index(bytes(puts[1].payload))
    with data.open("r+b") as file:
        file.seek(at)
        file.write(b"?")
    done = export_archive(tier, tmp_path / "archive")
    assert (done.chunks, done.skipped) == (1, 3)
    tier.close()


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    class Broken(MemoryTier):
        def stored_keys(self) -> list[bytes]:
            return [b"x" * 32]

        def header(self, prefix_hash: bytes) -> None:
            raise OSError("the disk does not answer")

    with pytest.raises(OSError, match="does not answer"):
        export_archive(Broken(), tmp_path / "archive")
    assert list(tmp_path.iterdir()) == []


def test_an_export_through_a_link_writes_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("other/target")
    (tmp_path / "other").mkdir()
    for _ in range(2):  # a new file, and one to replace
        export_archive(MemoryTier(), tmp_path / "link")
        assert (tmp_path / "link").readlink() == Path("other/target")
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["target"]
        import_archive(MemoryTier(), tmp_path / "other" / "target")


def test_an_export_replaces_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "folder", Path("/"), Path("")):
        with pytest.raises(InvalidRequest, match=f"^{path} is no regular file; name a new file or an archive to "):
            export_archive(MemoryTier(), path)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="symbolic links"):
        export_archive(MemoryTier(), tmp_path / "circle")


class During(MemoryTier):
    """A tier that calls a function in the middle of its export."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def stored_keys(self) -> list[bytes]:
        return [b"x" * 32]

    def header(self, prefix_hash: bytes) -> None:
        self._then()


def test_exporters_of_two_containers_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container counts its processes from one, and both have the same volume."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    path = tmp_path / "archive"
    inner: list[bytes] = []

    def other() -> None:
        export_archive(MemoryTier(), path)
        inner.append(path.read_bytes())

    assert export_archive(During(other), path).skipped == 1
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (inner[0], [path])
    import_archive(MemoryTier(), path)


def test_what_a_dead_exporter_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "arch[i]ve"
    child = subprocess.Popen(
        [sys.executable, "-c", _EXPORTS_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "begun\n"
        (living,) = tmp_path.iterdir()
        export_archive(MemoryTier(), path)
        assert sorted(tmp_path.iterdir()) == sorted([living, path])
        child.kill()
    stranger = tmp_path / ".archive.1.part"
    stranger.write_bytes(b"another archive's")
    export_archive(MemoryTier(), path)
    assert sorted(tmp_path.iterdir()) == sorted([stranger, path])


_EXPORTS_FOR_EVER = """
import sys, time, pathlib
from cache_daemon.durable.archive import export_archive
from tests.cache_daemon.doubles.memory_tier import MemoryTier
class Late(MemoryTier):
    def stored_keys(self):
        return [b"x" * 32]
    def header(self, name):
        print("begun", flush=True)
        time.sleep(600)
export_archive(Late(), pathlib.Path(sys.argv[1]))
"""


def test_every_changed_byte_is_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    rng = random.Random(5)
    for offset in {*range(60), *(rng.randrange(len(content)) for _ in range(150)), len(content) - 1}:
        broken = bytearray(content)
        broken[offset] ^= 1 << rng.randrange(8)
        archive.write_bytes(broken)
        with pytest.raises(InvalidRequest):
            import_archive(MemoryTier(), archive)


def test_every_truncation_is_refused(archive: Path) -> None:
    content = archive.read_bytes()
    rng = random.Random(5)
    for size in {*range(40), *(rng.randrange(len(content)) for _ in range(100)), len(content) - 1}:
        archive.write_bytes(content[:size])
        with pytest.raises(InvalidRequest):
            import_archive(MemoryTier(), archive)
    archive.write_bytes(content + b"x")
    with pytest.raises(InvalidRequest, match="1 bytes follow"):
        import_archive(MemoryTier(), archive)


def forged(*puts: Put, header_bytes: int | None = None, payload_bytes: int | None = None, end: int = 0) -> bytes:
    """An archive as an attacker would write it: every checksum is right."""
    body = b"KVSIDECAR-ARCHIVE\0" + struct.pack("<H", 2)
    for put in puts:
        header, payload = put.header.SerializeToString(), bytes(put.payload)
        sizes = header_bytes or len(header), payload_bytes or len(payload)
        checksum = xxhash.xxh3_64_intdigest(struct.pack("<Q", end) + header + payload)
        body += b"C" + struct.pack("<IQQQ", *sizes, end, checksum) + header + payload
    body += b"E" + struct.pack("<Q", len(puts))
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def changed(**fields: object) -> Put:
    put = chunk([1, 2, 3])
    for name, value in fields.items():
        setattr(put.header, name, value)
    return put


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (forged(changed(prefix_hash=b"x" * 32)), "not the one that its hash names"),
        (forged(changed(content_hash=b"x" * 32)), "not the one that its hash names"),
        (forged(changed(prefix_hash=b"")), "impossible hashes or tokens"),
        (forged(changed(checksum=1)), "another payload than its header says"),
        (forged(changed(layers=77)), "its layout has"),
        (forged(changed(layers=0)), "impossible layout"),
        (forged(changed(layers=2**32 - 1, kv_heads=2**32 - 1, head_dim=2**32 - 2)), "its layout has|impossible layout"),
        (forged(changed(bits=8)), "layout"),
        (forged(changed(format_version=9)), "format_version 9"),
        (forged(chunk([2], parent=chunk([1]))), "comes before its parent"),
        (forged(chunk([1]), payload_bytes=2**63), "at most"),
        (forged(chunk([1]), payload_bytes=10**8), "ends early"),
        (forged(chunk([1]), header_bytes=2**31), "at most 65536"),
        (b"", "is no archive"),
        (b"PK\3\4" + bytes(100), "is no archive"),
    ],
)
def test_forgeries_are_refused_with_a_sentence(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "archive").write_bytes(content)
    tier = MemoryTier()
    with pytest.raises(InvalidRequest, match=text):
        import_archive(tier, tmp_path / "archive")
    assert tier.usage().entries == 0


def test_a_true_forgery_would_be_imported(tmp_path: Path) -> None:
    """The forger of these tests writes what the importer reads: it is refused for the lie alone."""
    (tmp_path / "archive").write_bytes(forged(chunk([1]), chunk([2], parent=chunk([1]))))
    tier = MemoryTier()
    assert import_archive(tier, tmp_path / "archive").chunks == 2
    tier.apply(WriteGroup(remove=(key_of(chunk([1])),)))
    assert tier.usage().entries == 0


def noted(tier: DurableTier, put: Put, until: float | None) -> None:
    tier.apply(WriteGroup(notes={EXPIRY_NOTE_PREFIX + key_of(put): None if until is None else encode_expiry(until)}))


def test_times_go_along_and_what_is_over_does_not(tmp_path: Path) -> None:
    lasting, ending, over = chunk([1]), chunk([2]), chunk([3])
    source, now = opened(tmp_path / "store"), 1_000_000.0
    store(source, lasting, ending, over, chunk([4], parent=over))
    noted(source, ending, now + 60.5)
    noted(source, over, now - 1)
    done = export_archive(source, tmp_path / "archive", clock=lambda: now)
    source.close()
    assert (done.chunks, done.skipped) == (2, 2)
    target = MemoryTier()
    assert import_archive(target, tmp_path / "archive", clock=lambda: now + 60).chunks == 2
    assert target.notes() == {EXPIRY_NOTE_PREFIX + key_of(ending): encode_expiry(now + 60.5)}
    late = import_archive(other := MemoryTier(), tmp_path / "archive", clock=lambda: now + 61)
    assert (late.chunks, late.skipped, other.notes()) == (1, 1, {})


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [(None, 90.0, None), (50.0, 90.0, 90.0), (90.0, 50.0, 90.0), (50.0, None, None), (None, None, None)],
)
def test_of_what_is_stored_the_longer_time_counts(
    tmp_path: Path, here: float | None, there: float | None, kept: float | None
) -> None:
    source, target = opened(tmp_path / "store"), MemoryTier()
    for tier, until in ((source, there), (target, here)):
        store(tier, chunk([1]))
        noted(tier, chunk([1]), until)
    export_archive(source, tmp_path / "archive", clock=lambda: 1.0)
    source.close()
    import_archive(target, tmp_path / "archive", clock=lambda: 1.0)
    assert target.notes() == ({} if kept is None else {EXPIRY_NOTE_PREFIX + key_of(chunk([1])): encode_expiry(kept)})


def test_no_archive_asks_for_longer_than_anybody_may(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(forged(chunk([1]), end=2**64 - 1))
    tier = MemoryTier()
    import_archive(tier, tmp_path / "archive", clock=lambda: 1.0)
    assert tier.notes() == {EXPIRY_NOTE_PREFIX + key_of(chunk([1])): encode_expiry(1.0 + MAX_TTL_SECONDS)}


def test_an_archive_is_for_its_owner_alone(archive: Path) -> None:
    assert archive.stat().st_mode & 0o777 == 0o600


def twisted(put: Put, **fields: object) -> Put:
    """A chunk with other values in fields that none of its hashes covers."""
    header = type(put.header)()
    header.CopyFrom(put.header)
    for name, value in fields.items():
        setattr(header, name, value)
    return Put(header, put.payload)


UNFIT = {
    "an infinite time": ({"prefill_seconds": float("inf")}, "inf as its prefill_seconds"),
    "no time": ({"prefill_seconds": float("nan")}, "nan as its prefill_seconds"),
    "a time below zero": ({"prefill_seconds": -1.0}, "-1.0 as its prefill_seconds"),
    "no tenant": ({"tenant": b""}, "a tenant of 0 bytes"),
    "another number of tokens": ({"token_count": 17}, "17 as its token_count"),
    "another position": ({"start_position": 1016}, "begins at 1016, what it continues ends at 16"),
    "another layout": ({"kv_heads": 2, "head_dim": 8}, "its namespace has"),
    "another type": ({"dtype": 2}, "its namespace has"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_chunk_that_does_not_fit_its_parent_and_namespace_is_refused(tmp_path: Path, name: str) -> None:
    fields, named = UNFIT[name]
    first, second = chain(2)
    path = tmp_path / "archive"
    path.write_bytes(forged(first, twisted(second, **fields)))
    with pytest.raises(InvalidRequest, match=named):
        import_archive(MemoryTier(), path)


def test_a_layout_that_is_not_the_stores_is_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path / "store")
    store(tier, *chain(2))
    path = tmp_path / "archive"
    path.write_bytes(forged(twisted(chunk([9, 9]), kv_heads=2, head_dim=8)))
    with pytest.raises(InvalidRequest, match="its namespace has"):
        import_archive(tier, path)
    path.write_bytes(forged(chunk([9, 9])))
    assert import_archive(tier, path).chunks == 1
    tier.close()


def test_a_stored_header_with_an_infinite_time_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, twisted(chunk([1]), prefill_seconds=float("inf")), chunk([2]))
    tier.close()
    tier = LmdbTier(tmp_path, BUDGET)
    assert [list(loaded.header.token_ids) for loaded in tier.load()] == [[2]]
    assert tier.load_report.corrupt == 1
    tier.close()
