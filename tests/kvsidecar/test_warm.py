"""What ``kvsidecar warm`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvsidecar.cli.warm import texts, warm
from kvsidecar.errors import InvalidRequest


def test_a_folder_stands_for_the_texts_in_it(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "b" / "c.txt").write_text("second")
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").touch()
    assert [text.fields["prompt"] for text in texts([tmp_path])] == ["first", "second"]


def test_a_file_that_was_named_must_be_text(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnicodeDecodeError):
        texts([picture])


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no text in"):
        texts([tmp_path])


def test_a_list_has_a_prompt_a_line(tmp_path: Path) -> None:
    listed = tmp_path / "prompts.jsonl"
    listed.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}], "tools": []}\n')
    assert [(text.name[-2:], sorted(text.fields)) for text in texts([listed])] == [
        (":1", ["prompt"]),
        (":3", ["messages", "tools"]),
    ]


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """JSON permits Unicode's other separators inside of texts."""
    listed, text = tmp_path / "prompts.jsonl", "one\u2028two\x85three"
    listed.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [found.fields for found in texts([listed])] == [{"prompt": text}]


def test_a_text_keeps_its_line_ends(tmp_path: Path) -> None:
    """Another text would be stored than the one that a request has."""
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert [text.fields for text in texts([tmp_path / "dos.txt"])] == [{"prompt": "one\r\ntwo\rthree\n"}]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "prompts.jsonl:1 is not JSON"),
        ("[]", "is no prompt"),
        ('{"prompt": "a", "messages": []}', "is no prompt"),
        ('{"prompt": 5}', "prompt is a text"),
        ('{"prompt": "a", "temperature": 1}', "is no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_said(tmp_path: Path, line: str, why: str) -> None:
    listed = tmp_path / "prompts.jsonl"
    listed.write_text(line)
    with pytest.raises(InvalidRequest, match=why):
        texts([listed])


@pytest.mark.parametrize(("ttl", "why"), [("0s", "allowed are 1s to 30d"), ("31d", "1s to 30d"), ("soon", "--ttl: ")])
def test_a_time_that_nothing_is_kept_for_is_refused_before_anybody_is_asked(tmp_path: Path, ttl: str, why: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("first")
    with pytest.raises(InvalidRequest, match=why):
        warm([text], worker="/nowhere", ttl=ttl)
