"""Prompts of a verification: documents and a question, from a JSONL file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvsidecar.errors import InvalidRequest

BUILT_IN = Path(__file__).parent / "verify_prompts.jsonl"
_FORM = '{"documents": [TEXT, TEXT, ...], "question": TEXT}'


@dataclass(frozen=True)
class Question:
    """A prompt: documents in order, followed by a question."""

    documents: tuple[str, ...]
    question: str


def read_questions(path: Path) -> list[Question]:
    """Read JSONL of ``{"documents": [...], "question": "..."}``.

    Raises OSError, and InvalidRequest with the line number.
    """
    return [_question(line, f"line {n} of {path}") for n, line in enumerate(path.read_bytes().rstrip().split(b"\n"), 1)]


def _question(line: bytes, where: str) -> Question:
    try:
        given = json.loads(line.decode())
    except ValueError as error:  # also of a text that is not UTF-8
        raise InvalidRequest(f"{where} is not {_FORM}: {error}") from error
    documents, question = (given.get(k) for k in ("documents", "question")) if isinstance(given, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(documents, list) or len(documents) < 2 or not question:
        raise InvalidRequest(f"{where} is not {_FORM}, with two documents or more")
    if not all(isinstance(document, str) and document.strip() for document in documents):
        raise InvalidRequest(f"{where} has a document that is empty or no text")
    return Question(tuple(documents), question)
