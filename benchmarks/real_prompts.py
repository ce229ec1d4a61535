"""Real-text prompts for a trained model: reordered documents, dialogues and code, tasks, controls.

The text is a sample that ships with the benchmark (``data/SOURCES.md``). A control asks for a fact that one document
contains, so reuse without repair must not harm the answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted_bugs import planted_bug

SAMPLE = Path(__file__).parent / "data" / "real_text.jsonl"
TEXTS, TASKS, CONTROLS = ("documents", "dialogues", "code"), ("bugs", "conversations"), ("passkey", "quote")
_QUESTION_TOKENS = 48


@dataclass(frozen=True)
class RealPrompt:
    """A prompt in three parts, as token ids: its beginning ``head``, documents and question.

    ``answer`` is the right answer. If it is empty, the answer of the full prefill is the reference.
    """

    head: list[int]
    documents: list[list[int]]
    question: list[int]
    answer: list[int]


class RealSamples:
    """Draws prompts for a tokenizer. ``sample`` is a file with lines of ``{"kind", "parts"}``."""

    def __init__(self, tokenizer: Any, sample: Path = SAMPLE) -> None:
        self._tokenizer = tokenizer
        self._parts: dict[str, list[list[Any]]] = {}
        for line in sample.read_text(encoding="utf-8").splitlines():
            given = json.loads(line)
            self._parts.setdefault(given["kind"], []).append(given["parts"])
        self._kinds: dict[str, Callable[[random.Random], RealPrompt]] = {
            "documents": lambda rng: self._text("documents", rng),
            "code": lambda rng: self._text("code", rng),
            "dialogues": self._dialogue,
            "conversations": self._conversation,
            "bugs": self._bug,
            "passkey": self._passkey,
            "quote": self._quote,
        }

    def draw(self, kind: str, rng: random.Random) -> RealPrompt:
        """Draw a prompt; ``kind`` is one of TEXTS, TASKS and CONTROLS. Equal states of ``rng`` give equal prompts."""
        return self._kinds[kind](rng)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _prompt(self, documents: list[str], question: str, answer: str = "", end: str = "\n\n") -> RealPrompt:
        head: list[int] = self._tokenizer("", add_special_tokens=True)["input_ids"]
        head = head or [self._tokenizer.bos_token_id or 0]
        asked = self._ids(question)
        return RealPrompt(head, [self._ids(d + end) for d in documents], asked, self._ids(answer) if answer else [])

    def _window(self, kind: str, rng: random.Random, least: int = 2, most: int = 6, step: int = 1) -> list[Any]:
        """Return ``least`` to ``most`` consecutive parts of a text, and the part that follows them."""
        parts = rng.choice([p for p in self._parts[kind] if len(p) > least])
        count = min(rng.randint(least, most), len(parts) - 1)
        start = rng.randrange(0, len(parts) - count, step)
        found: list[Any] = parts[start : start + count + 1]
        return found

    def _text(self, kind: str, rng: random.Random) -> RealPrompt:
        *documents, following = self._window(kind, rng)
        if rng.random() < 0.5:
            question = self._tokenizer.decode(self._ids(following)[:_QUESTION_TOKENS])
        else:
            words = [w for w in rng.choice(documents).replace("`", " ").split() if w.isalpha() and len(w) > 5]
            about = rng.choice(words or ["text"])
            question = f"Question: What is said about {about} above, and what follows from it?\nAnswer:"
        return self._prompt(documents, question)

    def _dialogue(self, rng: random.Random) -> RealPrompt:
        turns = self._window("dialogues", rng, 8, 24)
        spoken = [f"{'Customer' if who == 'user' else 'Agent'}: {text}" for who, text in turns]
        documents = ["\n".join(spoken[i : i + 3]) for i in range(0, len(spoken) - 1, 3)]
        answering = "Agent" if turns[-1][0] == "user" else "Customer"
        return self._prompt(documents, f"{spoken[-1]}\n{answering}:", end="\n")

    def _conversation(self, rng: random.Random) -> RealPrompt:
        """Build a chat in the model's format, with two turns per document."""
        turns = self._window("dialogues", rng, 8, 24)
        if turns[-1][0] != "user":
            turns = turns[:-1]
        said = [f"<|im_start|>{who}\n{text}<|im_end|>" for who, text in turns]
        documents = ["\n".join(said[i : i + 2]) for i in range(0, len(said) - 1, 2)]
        return self._prompt(documents, f"{said[-1]}\n<|im_start|>assistant\n", end="\n")

    def _bug(self, rng: random.Random) -> RealPrompt:
        found = planted_bug(rng, rng.randint(4, 8))
        return self._prompt(list(found.functions), found.question, f" {found.line}")

    def _passkey(self, rng: random.Random) -> RealPrompt:
        *documents, _ = self._window("documents", rng)
        key = "".join(rng.choices("0123456789", k=5))
        documents.insert(
            rng.randrange(len(documents) + 1), f"The pass key is {key}. Remember it. {key} is the pass key."
        )
        return self._prompt(documents, "What is the pass key? The pass key is", f" {key}")

    def _quote(self, rng: random.Random) -> RealPrompt:
        kind = rng.choice(["documents", "code"])
        *documents, _ = self._window(kind, rng)
        ids = self._ids(rng.choice(documents))
        start = rng.randrange(max(1, len(ids) - 48))
        ids = ids[start : start + 48]
        prompt = self._prompt(documents, "")
        half = len(ids) // 2
        return RealPrompt(prompt.head, prompt.documents, ids[:half], ids[half:])
