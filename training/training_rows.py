"""Training rows of the demo model: copies, look-up tasks, language."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from training import bpe, relocated_documents, tasks

IGNORED = -100
FACTS, FILLER = 6, 24  # facts and maximum filler words of a task at full difficulty


@dataclass
class TrainingRow:
    """A training row. ``learned`` maps the index of a token to the token that the model learns to predict there.

    If ``learned`` is None, the model learns to predict every token of the row.
    """

    tokens: list[int]
    kind: str
    learned: dict[int, int] | None


class RowGenerator:
    """Generator of training rows. Every step creates one, which the step number seeds."""

    def __init__(self, tokenizer: Tokenizer, stream: np.ndarray, seed: int, task_share: float = 0.6) -> None:
        self.tokenizer, self.stream, self.rng = tokenizer, stream, random.Random(seed)
        self.task_share = task_share
        self.ids = {w: tokenizer.token_to_id(w) for w in bpe.SPECIAL_TOKENS}
        # Copy rows use only the task words: with the whole vocabulary, each embedding would occur too rarely.
        words = tasks.NAMES + tasks.PLACES + tasks.OBJECTS + tasks.FILLERS
        self.alphabet = sorted({tokenizer.encode(" " + word).ids[0] for word in words})

    def copy(self, span: int) -> TrainingRow:
        """Return a row of random tokens in which a random span occurs twice."""
        rng = self.rng
        n = rng.randint(max(4, span // 3), span)
        row = [rng.choice(self.alphabet) for _ in range(3 * n)]
        length, start = rng.randint(max(3, n // 2), n), rng.randint(0, n)
        target = min(start + length + rng.randint(0, n // 2), 3 * n - 2)
        learned = {}
        for i in range(length):
            if target + i < len(row):
                row[target + i] = row[start + i]
                if i:
                    learned[target + i] = row[target + i]
        return TrainingRow(row, "copy", learned)

    def task(self, name: str, facts: int, filler: int, implied: bool = False) -> TrainingRow:
        """Return a look-up sample.

        With ``implied``, the model also learns to predict the word that a document implies, at the position from which
        it follows; the row does not contain this word. With ``implied``, half of the rows of ``latest`` have many
        statements about one or two names. A model could compare a few statements while it reads the documents; with
        many, it must find the last one when it reads the question.
        """
        sample = tasks.TASKS[name](self.rng, facts, filler)
        if implied and name == "latest" and self.rng.random() < 0.5:
            sample = tasks.latest(self.rng, self.rng.randint(6, 16), min(filler, 8), names=self.rng.randint(1, 2))
        row, learned = [self.ids["<|bos|>"]], {}
        for document in sample.documents:
            row += [self.ids["<|doc|>"], *self._encode(f" {document.before}{document.fact}")]
            if implied and document.implied:
                learned[len(row)] = self._encode(" " + document.implied)[0]
            row += self._encode("." + document.after)
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            row += [self.ids["<|ask|>"], *self._encode(" " + question), *self._encode(" " + answer)]
            learned[len(row) - 1] = row[-1]
        return TrainingRow(row, name, learned)

    def latest_in_parts(self) -> relocated_documents.DocumentRow:
        """Return a ``latest`` sample as documents, for reading in another order than that of the prompt."""
        rng = self.rng
        if rng.random() < 0.5:
            sample = tasks.latest(rng, rng.randint(2, FACTS), FILLER)
        else:
            sample = tasks.latest(rng, rng.randint(6, 16), 8, names=rng.randint(1, 2))
        documents = [[self.ids["<|doc|>"], *self._encode(f" {document.text}")] for document in sample.documents]
        tail, learned = [], []
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            tail += [self.ids["<|ask|>"], *self._encode(" " + question), *self._encode(" " + answer)]
            learned.append(len(tail) - 1)
        return relocated_documents.DocumentRow([[self.ids["<|bos|>"]], *documents], tail, learned)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def language(self, length: int) -> TrainingRow:
        start = self.rng.randrange(len(self.stream) - length)
        return TrainingRow([int(t) for t in self.stream[start : start + length]], "language", None)


def batch(rows: list[TrainingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows and return the input ids and labels, both ``[rows, longest]``."""
    longest = max(len(r.tokens) for r in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        if row.learned is None:
            labels[i, 1 : len(row.tokens)] = ids[i, 1 : len(row.tokens)]
        else:
            labels[i, list(row.learned)] = torch.tensor(list(row.learned.values()))
    return ids, labels
