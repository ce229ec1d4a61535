"""Records of GGUF files: valid only for the contents that were read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from kvsidecar.models import file_state, model_library
from kvsidecar.models.model_library import ModelLibrary


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A GGUF file of two parts, which the library does not look into."""
    found = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in found:
        part.write_bytes(bytes(100))
    return found


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLibrary:
    monkeypatch.setattr(file_state, "CLOCK_STEP_NS", 20_000_000)
    return ModelLibrary(tmp_path / "models")


@pytest.mark.parametrize("changed", [0, 1])
def test_a_part_with_other_contents_but_the_same_size_and_time_is_read_again(
    library: ModelLibrary, parts: list[Path], changed: int
) -> None:
    os.utime(parts[0], ns=(0, 0))  # the other part is the newest
    times = parts[changed].stat()
    time.sleep(0.1)
    first = library.remember(parts[0], "bfloat16", coded=False)
    assert library.known(parts[0]) == first
    parts[changed].write_bytes(b"b" * 100)
    os.utime(parts[changed], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert library.known(parts[0]) is None
    assert library.remember(parts[0], "bfloat16", coded=False).sha256 != first.sha256


def test_a_file_that_changes_while_it_is_read_is_read_again(
    library: ModelLibrary, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.1)
    read = model_library.sha256_of

    def changing(file: Path) -> str:
        found = read(file)
        parts[0].write_bytes(b"b" * 100)
        return found

    monkeypatch.setattr(model_library, "sha256_of", changing)
    library.remember(parts[0], "bfloat16", coded=False)
    assert library.known(parts[0]) is None


def test_a_file_that_was_written_a_moment_ago_is_read_again(
    library: ModelLibrary, parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_state, "CLOCK_STEP_NS", 3_600_000_000_000)
    library.remember(parts[0], "bfloat16", coded=False)
    assert library.known(parts[0]) is None
