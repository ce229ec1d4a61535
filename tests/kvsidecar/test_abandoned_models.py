"""Folders that killed processes left unfinished are removed by the next process that builds a model beside them."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.models.model_library import ModelLibrary


def left_by_a_killed_process(parent: Path, name: str) -> Path:
    folder = parent / name
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights.bin").write_bytes(bytes(100))
    return folder


def test_they_are_removed_unless_a_process_may_work_on_them(tmp_path: Path) -> None:
    library, parent = ModelLibrary(tmp_path), tmp_path / "converted"
    for name in ("first", "second"):
        with library.locked(parent / name):
            pass
    names = (".partial-first", ".gone-second", ".gone-new")
    abandoned = [left_by_a_killed_process(parent, name) for name in names]
    unlocked = left_by_a_killed_process(parent, ".partial-other-1")  # not of this library
    kept = [unlocked, *(left_by_a_killed_process(parent, name) for name in (".partial-busy", "first", "second"))]
    with library.locked(parent / "busy"), library.building(parent / "new") as folder:
        assert folder is not None
        assert not any(path.exists() for path in abandoned), "their disk space is free for the new folder"
    assert all((path / "inner" / "weights.bin").exists() for path in kept)
    assert (parent / "new").is_dir()
