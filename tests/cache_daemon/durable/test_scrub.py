"""Verifying a whole store, offline and online."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.durable_tier import ReadResult
from cache_daemon.durable.scrub import scrub
from tests.cache_daemon.durable.chunks import chain, opened, read, store


def flip(folder: Path, content: bytes) -> None:
    """One bit in a payload."""
    data = folder / "data.mdb"
    at = data.read_bytes().index(content)
    with data.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[0] ^ 1]))


def test_a_sound_store_is_clean(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, *chain(8))
    tier.close()
    heard: list[tuple[int, int]] = []
    found = scrub(tmp_path, repair=True, progress=lambda done, of: heard.append((done, of)))
    assert found.is_clean
    assert found.sound == 8
    assert heard[-1] == (8, 8)


def test_what_is_corrupt_is_counted_and_removed_with_its_descendants(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    puts = chain(5)
    store(tier, *puts)
    tier.close()
    flip(tmp_path, bytes(puts[2].payload))
    found = scrub(tmp_path, repair=False)
    assert (found.sound, found.corrupt, found.orphaned, found.repaired) == (2, 1, 2, False)
    assert scrub(tmp_path, repair=True).corrupt == 1
    assert scrub(tmp_path, repair=False).is_clean
    tier = opened(tmp_path)
    assert read(tier, *puts) == [ReadResult.OK] * 2 + [ReadResult.MISSING] * 3
    tier.close()
    assert not list(tmp_path.glob("*.damaged-*")), "no page was damaged, nothing is set aside"


def test_a_damaged_page_is_reported_and_the_file_set_aside(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    store(tier, *chain(5))
    tier.close()
    with (tmp_path / "data.mdb").open("r+b") as file:
        file.write(bytes(100))
    assert scrub(tmp_path, repair=True).problems
    assert scrub(tmp_path, repair=False).is_clean
    assert list(tmp_path.glob("*.damaged-1"))


def test_a_store_in_use_or_not_there_is_refused(tmp_path: Path) -> None:
    tier = opened(tmp_path / "a")
    with pytest.raises(StoreUnavailable, match="another daemon uses"):
        scrub(tmp_path / "a", repair=True)
    tier.close()
    with pytest.raises(StoreUnavailable, match="cannot open the store"):
        scrub(tmp_path / "b", repair=True)


@pytest.mark.parametrize("repair", [False, True])
def test_a_file_of_another_program_is_refused_and_unchanged(tmp_path: Path, repair: bool) -> None:
    foreign = b"garbage" * 5000
    (tmp_path / "data.mdb").write_bytes(foreign)
    with pytest.raises(StoreUnavailable, match="no store of this program"):
        scrub(tmp_path, repair=repair)
    assert (tmp_path / "data.mdb").read_bytes() == foreign
    assert not list(tmp_path.glob("*.damaged-*"))


def test_a_file_system_without_locks_is_no_other_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreUnavailable, match=r"^cannot open the store in .*No locks available"):
        scrub(tmp_path, repair=False)
