"""The fingerprint of a model's weights covers every byte, and is computed once per file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import threading
import time
from pathlib import Path

import pytest
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models import file_digests, file_state
from kvsidecar.models.weights_fingerprint import of_directory, of_engine_directory

SHARDS = ["model-1.safetensors", "model-2.safetensors"]
# For each folder: its files, those that its index names, and those that vLLM loads.
ENGINE_FOLDERS = {
    "a model beside shards": (["model.safetensors", *SHARDS], SHARDS, SHARDS),
    "Mistral's file beside shards": (["consolidated.safetensors", *SHARDS], SHARDS, ["consolidated.safetensors"]),
    "several files without an index": (["model.safetensors", *SHARDS], [], ["model.safetensors", *SHARDS]),
}
TENSOR_BYTES = 3 << 20
MIDDLE = TENSOR_BYTES // 3  # far from the tensor's beginning, middle and end


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of remembered digests, for files that may have changed a millisecond ago."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(file_state, "CLOCK_STEP_NS", 50_000_000)
    return tmp_path / "data"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_in(tmp_path / "model")


def model_in(folder: Path, files: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    for number in range(files):
        write_weights(folder / f"model-{number}.safetensors", number)
    return folder


def write_weights(file: Path, number: int) -> None:
    tensor = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": [0, TENSOR_BYTES]}
    header = json.dumps({f"w{number}": tensor}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes([number]) * TENSOR_BYTES)


def engine_folder(folder: Path, name: str) -> tuple[Path, list[Path]]:
    """Create one of the ``ENGINE_FOLDERS``; return it, and the files that vLLM loads."""
    files, indexed, loaded = ENGINE_FOLDERS[name]
    model_in(folder, files=0)
    for number, file in enumerate(files):
        write_weights(folder / file, number)
    if indexed:
        weight_map = {f"w{files.index(file)}": file for file in indexed}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder, [folder / file for file in loaded]


def flip(file: Path, at: int) -> None:
    """Change one bit, ``at`` bytes before the file's end."""
    with file.open("r+b") as data:
        data.seek(-at, os.SEEK_END)
        (old,) = data.read(1)
        data.seek(-at, os.SEEK_END)
        data.write(bytes([old ^ 1]))


def settle() -> None:
    """Wait until the files are old enough to be remembered."""
    time.sleep(file_state.CLOCK_STEP_NS / 1e9 * 2)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read in full, in order."""
    found: list[Path] = []
    original = file_digests._read_digests

    def counted(files: list[Path]) -> list[bytes]:
        found.extend(files)
        return original(files)

    monkeypatch.setattr(file_digests, "_read_digests", counted)
    return found


def test_one_byte_inside_a_tensor_changes_the_fingerprint(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    assert of_directory(other) == of_directory(model)
    flip(other / "model-0.safetensors", MIDDLE)
    assert of_directory(other) != of_directory(model)


@pytest.mark.parametrize("at", [1, MIDDLE, TENSOR_BYTES])
def test_every_piece_of_a_file_counts(model: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(file_digests, "_PIECE_BYTES", 1 << 20)
    before = of_directory(model)
    flip(model / "model-0.safetensors", at)
    assert of_directory(model) != before


def test_a_fingerprint_is_the_same_on_every_machine_and_in_every_version(model: Path) -> None:
    data = (model / "model-0.safetensors").read_bytes()
    piece = hashlib.sha256(data).digest()
    whole = hashlib.sha256(b'{"hidden_size": 8}' + hashlib.sha256(piece).digest())
    assert of_directory(model) == whole.digest()


@pytest.mark.parametrize("name", ENGINE_FOLDERS)
def test_each_file_that_an_engine_may_load_counts(tmp_path: Path, name: str) -> None:
    folder, loaded = engine_folder(tmp_path / "model", name)
    found = [of_engine_directory(folder)]
    for file in loaded:
        flip(file, MIDDLE)
        found.append(of_engine_directory(folder))
    assert len(set(found)) == len(loaded) + 1


def test_an_engine_that_may_load_other_files_has_another_fingerprint(tmp_path: Path) -> None:
    """The name or the index decides which of the same files are loaded."""
    folder, (loaded,) = engine_folder(tmp_path / "model", "Mistral's file beside shards")
    found = [of_engine_directory(folder)]
    loaded.rename(folder / "a.safetensors")
    found.append(of_engine_directory(folder))
    (folder / "model.safetensors.index.json").unlink()
    found.append(of_engine_directory(folder))
    assert len(set(found)) == 3


def test_an_engine_with_one_file_has_the_fingerprint_of_a_worker(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w0": "model-0.safetensors"}}')
    assert of_engine_directory(model) == of_directory(model)


def test_an_engine_without_safetensors_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"holds no \.safetensors file"):
        of_engine_directory(model_in(tmp_path / "model", files=0))


def test_a_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    model = model_in(tmp_path / "model", files=2)
    settle()
    first = of_directory(model)
    assert reads == sorted(model.glob("*.safetensors"))
    assert of_directory(model) == first
    assert len(reads) == 2
    settle()
    flip(model / "model-1.safetensors", MIDDLE)
    assert of_directory(model) != first
    assert reads[2:] == [model / "model-1.safetensors"]


def test_a_change_that_keeps_size_and_time_is_seen(model: Path) -> None:
    settle()
    first, file = of_directory(model), model / "model-0.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    flip(file, MIDDLE)
    os.utime(file, ns=times)
    assert of_directory(model) != first


def test_a_file_that_changed_just_now_is_not_remembered(
    model: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change may get the same time."""
    monkeypatch.setattr(file_state, "CLOCK_STEP_NS", 3_600_000_000_000)
    assert of_directory(model) == of_directory(model)
    assert len(reads) == 2


@pytest.mark.parametrize(
    "note", [b"", b'{"size_by', b"[1, 2]", b'{"digest": 7}', b"\xff\xfe", b'{"digest": "00"}', b'{"digest": "zz"}']
)
def test_a_corrupt_note_is_ignored(model: Path, data_dir: Path, reads: list[Path], note: bytes) -> None:
    settle()
    first = of_directory(model)
    (known,) = (data_dir / "kvsidecar" / "models" / "known").glob("[!.]*.json")
    kept = json.loads(known.read_bytes())
    try:
        changed = json.dumps(kept | json.loads(note)).encode()  # a valid file state with another digest
    except (ValueError, TypeError):
        changed = note
    known.write_bytes(changed)
    assert of_directory(model) == first
    assert len(reads) == 2


def test_without_a_folder_for_notes_the_fingerprint_is_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, said = of_directory(model), list[str]()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))  # no folder can be created below a file
    assert of_directory(model, said.append) == first
    assert "cannot write to" in said[0]
    assert "next start" in said[0]


def test_without_a_home_the_fingerprint_is_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: str) -> str:
        return "~"

    first, said = of_directory(model), list[str]()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(os.path, "expanduser", no_home)
    assert of_directory(model, said.append) == first
    assert "next start" in said[0]


def test_starts_at_once_read_a_file_once(model: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settle()
    results: list[bytes] = []
    all_started, counted = threading.Barrier(4), file_digests._read_digests

    def slow(files: list[Path]) -> list[bytes]:
        time.sleep(0.3)  # the others arrive meanwhile
        return counted(files)

    def start() -> None:
        all_started.wait()
        results.append(of_directory(model))

    monkeypatch.setattr(file_digests, "_read_digests", slow)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    assert len(reads) == 1


def test_a_long_read_says_what_it_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    told = threading.Event()

    def waiting(_: list[Path]) -> list[bytes]:
        assert told.wait(60)
        return [b"0" * 32]

    def tell(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(file_digests, "_TELL_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(file_digests, "_read_digests", waiting)
    of_directory(model, tell)
    assert len(said) == 1
    assert str(model) in said[0]
    assert "3.0 MiB" in said[0]


def test_a_short_read_says_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(file_digests, "_TELL_AFTER_SECONDS", 60.0)
    of_directory(model, said.append)
    assert said == []


@pytest.mark.parametrize("size", [0, 5, 20])
def test_a_truncated_file_is_refused(model: Path, size: int) -> None:
    file = model / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelUnsupported, match="truncated"):
        of_directory(model)
