"""Token streams of a training corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from inference_svc.models.loader import DEMO_MODEL
from training import corpus


def dialogue_file(path: Path, count: int, text: str = "where is the ball") -> Path:
    lines = [json.dumps({"turns": [["user", f"{text} {n}"], ["Assistant", f"in box {n}"]]}) for n in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_roles_may_be_whole_words_and_letters(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"turns": [["user", "a"], ["assistant", "b"], ["U", "c"], ["A", "d"]]}))
    assert [[role for role, _ in turns] for turns in corpus.dialogues(path)] == [["user", "assistant"] * 2]


def test_streams_are_built_again_for_other_files_or_another_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))

    def length(files: list[Path], tokenizer: Tokenizer = tokenizer) -> int:
        return len(corpus.encode(tokenizer, files, [], tmp_path / "tokens")[0])

    one, other = (dialogue_file(tmp_path / f"{n}.jsonl", n) for n in (4000, 6000))
    assert length([one]) == length([one]) < length([other]) < length([one, other])
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens(["where is the ball"])
    assert length([one], words) < length([one])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    with pytest.raises(SystemExit, match="held-out tokens; allowed are at least 1024"):
        corpus.encode(tokenizer, [dialogue_file(tmp_path / "d.jsonl", 300)], [], tmp_path / "tokens")
