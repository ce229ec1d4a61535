"""Weights come from the disk while a worker imports what it computes with."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest
from kvsidecar.errors import ConfigurationError

from inference_svc.__main__ import main
from inference_svc.models import weight_prefetch

_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def cached_bytes(file: Path) -> int:
    """How much of a file is in the page cache (mincore(2))."""
    with file.open("r+b") as data, mmap.mmap(data.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        assert _libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapped)), pages) == 0
        del start
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder with weights on the disk alone."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(_BYTES))
    with file.open("rb") as data:
        os.fsync(data.fileno())
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(file) > _BYTES // 8:
        pytest.skip("the file system of the tests' folder keeps its files in memory")
    return file


def test_they_are_in_the_page_cache_soon(weights: Path) -> None:
    thread = weight_prefetch.prefetch_weights(str(weights.parent))
    assert thread is not None
    thread.join(60)
    deadline = time.monotonic() + 60
    while cached_bytes(weights) < _BYTES:  # the disk reads on after the system has been told
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_more_than_half_of_the_memory_is_left_where_it_is(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_prefetch, "free_bytes", lambda: 2 * _BYTES - 1)
    assert weight_prefetch.prefetch_weights(str(weights.parent)) is None


@pytest.mark.parametrize("model", ["shape:nothing", "/nowhere/at/all", "nobody/has-this", ""])
def test_what_is_not_here_is_loadings_to_say(model: str) -> None:
    assert weight_prefetch.prefetch_weights(model) is None


def test_a_worker_begins_with_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def planted(model: str) -> None:
        raise ConfigurationError(f"planted for {model}")

    monkeypatch.setattr(weight_prefetch, "prefetch_weights", planted)
    assert main(["worker", "--model=demo", "--cache-socket=none"]) == 2
    assert "planted for demo" in capsys.readouterr().err
