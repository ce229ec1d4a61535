"""Prompts with judged tokens, and the logits of each arm at these tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.repair_strategies import STRATEGIES
from inference_svc.context_reuse.reuse_lab import LabResult, ReuseLab
from inference_svc.context_reuse.selectors import DEFAULT_SELECTOR
from inference_svc.context_reuse.verifier import shuffled_order
from training import tasks

TEXT = Path(__file__).parent / "data" / "held_out.jsonl"
RATIOS = (0.05, 0.15, 0.3)
REPAIRS = ("random", "first_k", "selective", "cacheblend", DEFAULT_SELECTOR)


@dataclass(frozen=True)
class Arm:
    """A kind of reuse: of the prompt's own prefix, or with ``shuffled`` of its documents stored in another order."""

    name: str
    shuffled: bool
    bits: int = 16
    strategy: str = "none"
    ratio: float = 0.0


EXACT = [Arm(f"exact_{bits}bit", False, bits) for bits in (16, 8, 4, 2)]
SHUFFLED = [
    Arm("none", True),
    *(Arm(f"{s}_r{r:g}", True, 16, s, r) for s in REPAIRS for r in RATIOS),
    Arm("cacheblend_r1", True, 16, "cacheblend", 1.0),
    Arm(f"{DEFAULT_SELECTOR}_r0.15_8bit", True, 8, DEFAULT_SELECTOR, 0.15),
    Arm(f"{DEFAULT_SELECTOR}_r0.15_4bit", True, 4, DEFAULT_SELECTOR, 0.15),
]


@dataclass(frozen=True)
class JudgedPrompt:
    """A prompt in three parts: its beginning ``head``, documents, and the question ``tail``.

    ``at`` has the positions whose next token is judged; ``gold`` has these expected tokens.
    """

    head: list[int]
    documents: list[list[int]]
    tail: list[int]
    at: list[int]  # relative to the start of the tail
    gold: list[int]


class PromptSampler:
    """Draws judged prompts for a model."""

    def __init__(self, lab: ReuseLab, facts: int, filler: int) -> None:
        self._tokenizer = lab.loaded.tokenizer
        self._facts, self._filler = facts, filler
        self.texts = [json.loads(line)["text"] for line in TEXT.read_text(encoding="utf-8").splitlines()]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def task(self, name: str, rng: random.Random) -> JudgedPrompt:
        """Draw a prompt of a synthetic task."""
        sample = tasks.TASKS[name](rng, rng.randint(3, self._facts), self._filler)
        documents = [self._ids(f"<|doc|> {d.text}") for d in sample.documents]
        tail: list[int] = []
        at, gold = [], []
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            tail += self._ids(f"<|ask|> {question}") + self._ids(f" {answer}")
            at.append(len(tail) - 2)
            gold.append(tail[-1])
        return JudgedPrompt(self._ids("<|bos|>"), documents, tail, at, gold)

    def text(self, rng: random.Random, chunk: int = 64, chunks: int = 6, tail: int = 64) -> JudgedPrompt:
        """Draw a part of a held-out text. Its first tokens become chunks, and the tokens after them are judged."""
        while True:
            ids = self._ids(rng.choice(self.texts))
            need = chunk * chunks + tail
            if len(ids) > need:
                break
        start = rng.randrange(len(ids) - need)
        parts = [ids[start + i * chunk : start + (i + 1) * chunk] for i in range(chunks)]
        rest = ids[start + chunk * chunks : start + need]
        return JudgedPrompt(self._ids("<|bos|>"), parts, rest, list(range(tail - 1)), rest[1:])


def arm_outcomes(
    lab: ReuseLab, prompt: JudgedPrompt, arms: Sequence[Arm], rng: random.Random
) -> Iterator[tuple[str, LabResult]]:
    """Yield each arm's name and result; the first is the full prefill ``full``."""
    read = lab.documents(prompt.head, prompt.documents)
    tokens = read.tokens + prompt.tail
    at = np.asarray(prompt.at) + len(read.tokens)
    yield "full", lab.full_prefill(tokens, at)
    yield "full_pieces", lab.full_prefill(tokens, at, piece=rng.choice([17, 40, 100]))
    for bits in {a.bits for a in arms if not a.shuffled}:
        chunks = read.stored(bits)
        for arm in (a for a in arms if not a.shuffled and a.bits == bits):
            yield arm.name, lab.reuse(tokens, chunks, [], STRATEGIES["none"], 0.0, at)
    order = shuffled_order(len(prompt.documents), rng)
    for bits in {a.bits for a in arms if a.shuffled}:
        head, placed = read.stored_in_order(order, bits)
        for arm in (a for a in arms if a.shuffled and a.bits == bits):
            yield arm.name, lab.reuse(tokens, head, placed, STRATEGIES[arm.strategy], arm.ratio, at)
