"""What ``kvsidecar warm`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvsidecar.cli.main import _texts
from kvsidecar.errors import InvalidRequest


def test_a_folder_stands_for_the_texts_in_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "b" / "c.txt").write_text("second")
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    assert [text for _, text in _texts([tmp_path])] == ["first", "second"]


def test_a_file_that_was_named_must_be_text(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnicodeDecodeError):
        _texts([picture])


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no text in"):
        _texts([tmp_path])
