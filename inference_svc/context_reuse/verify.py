"""Measures whether a model may reuse text that was read in another context.

Each prompt is documents and a question. The documents are stored as they were in another order, put into the prompt,
repaired, and compared with a full prefill over every token of the question and of the greedy answer. A control quotes
one of the documents instead of asking: what follows is in that document, so that reuse without repair does no harm, and
a repair must not. The report can fail; only a repair that passes is used by workers that are set to
``approximate=verified``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from kvsidecar.errors import InvalidRequest

from inference_svc.context_reuse.reuse_lab import LabDocuments, LabResult, ReuseLab, shuffled_order
from inference_svc.context_reuse.reuse_report import EXACT, Finding, Report, Thresholds, failure_reason
from inference_svc.context_reuse.selectors import (
    AUTO_SELECTORS,
    DEFAULT_RATIO,
    SELECTORS,
    THOROUGH_RATIO,
    THOROUGH_SELECTOR,
)

BUILT_IN = Path(__file__).parent / "verify_prompts.jsonl"
_ANSWER = 16
# Other sizes in which a prompt is read: what they change is the noise floor.
_NOISE_PIECE = 40
# A control quotes so many tokens; what a model predicts of the last ones is judged.
_QUOTED, _JUDGED = 32, 16


@dataclass(frozen=True)
class Question:
    """A prompt: documents in their order, then what is asked."""

    documents: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Candidate:
    """A repair to be judged, at a share of the tokens."""

    strategy: str
    ratio: float


def candidates(repair: str, ratio: float | None = None) -> tuple[Candidate, ...]:
    """What a verification of a worker's setting measures: the repair of that name, or those of ``auto``, at that share,
    or at those that are tried where none is set."""
    names = AUTO_SELECTORS if repair == "auto" else (repair,)
    found = [Candidate(name, DEFAULT_RATIO if ratio is None else ratio) for name in names]
    if ratio is None and THOROUGH_SELECTOR in names:
        found.append(Candidate(THOROUGH_SELECTOR, THOROUGH_RATIO))
    return tuple(found)


def read_questions(path: Path) -> list[Question]:
    """Reads JSONL of ``{"documents": [...], "question": "..."}``. Raises InvalidRequest naming the line."""
    out = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            given = json.loads(line)
            out.append(Question(tuple(given["documents"]), given["question"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f'line {number} of {path} is not {{"documents": [...], "question": "..."}}: {error}'
            ) from error
    return out


class Verifier:
    """Verifies one model at one storage width."""

    def __init__(self, lab: ReuseLab, bits: int, thresholds: Thresholds | None = None) -> None:
        self._lab, self._bits, self._thresholds = lab, bits, thresholds or Thresholds()

    def run(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Candidate],
        compare: Sequence[str] = (),
        progress: Callable[[], None] = lambda: None,
    ) -> Report:
        """Measures candidates, of which the cheapest that passes is chosen, and, for comparison, ``none`` and others at
        the first candidate's ratio. Raises InvalidRequest."""
        if not questions or any(len(q.documents) < 2 or not q.question for q in questions):
            raise InvalidRequest("at least one prompt is needed, each with two documents or more and a question")
        first = candidates[0].ratio
        others = [Candidate("none", 0.0), *(Candidate(name, first) for name in compare)]
        arms = {c: _Divergence() for c in dict.fromkeys((*candidates, *others))}
        exact, noise = _Divergence(), _Divergence()
        total = sum(self._positions(question) for question in questions)
        for number, question in enumerate(questions):
            going = self._undecided_arms(arms, others[0], total)
            if not going:
                break
            self._measure(question, number, going, exact, noise)
            progress()
        none = self._finding(Candidate("none", 0.0), arms[others[0]])
        found = [self._finding(c, d) for c, d in arms.items()]
        found = [replace(f, why=failure_reason(f, none, self._thresholds)) for f in found]
        passing = [f for f in found[: len(candidates)] if f.passed]
        chosen = (
            min(passing, key=lambda f: (round(f.cost, 2), f.kl_mean))
            if passing
            else min(found[: len(candidates)], key=lambda f: f.kl_mean)
        )
        prefix = replace(self._finding(Candidate("none", 0.0), exact), arm=EXACT)
        noise_kl = float(np.mean(noise.kl))
        return Report(self._lab.loaded.id, len(questions), noise_kl, (prefix, *found), chosen, self._thresholds)

    def _positions(self, question: Question) -> int:
        """How many predictions of a question and its answer are judged."""
        return len(self._asked(question)) + _ANSWER - 1

    def _asked(self, question: Question) -> list[int]:
        ids: list[int] = self._lab.loaded.tokenizer(question.question, add_special_tokens=False)["input_ids"]
        return ids

    def _undecided_arms(
        self, arms: dict[Candidate, _Divergence], none: Candidate, total: int
    ) -> dict[Candidate, _Divergence]:
        """The arms that further prompts can tell something of: a divergence is never negative, so one whose sum is too
        large for all ``total`` predictions has failed. Reuse without repair is needed beside those that may pass."""
        undecided = {c for c, d in arms.items() if not d.must_fail(self._thresholds, total)}
        judged = undecided | {none} if undecided - {none} else undecided
        return {c: d for c, d in arms.items() if c in judged}

    def _measure(
        self,
        question: Question,
        seed: int,
        arms: dict[Candidate, _Divergence],
        exact: _Divergence,
        noise: _Divergence,
    ) -> None:
        lab, tokenizer, rng = self._lab, self._lab.loaded.tokenizer, random.Random(seed)
        head = tokenizer("", add_special_tokens=True)["input_ids"] or [tokenizer.bos_token_id or 0]
        parts = [tokenizer(d + "\n\n", add_special_tokens=False)["input_ids"] for d in question.documents]
        read = lab.documents(head, parts)
        asked, order = _Tail(read, self._asked(question)), shuffled_order(len(parts), rng)
        quoted = _Tail(read, _quote(parts, rng), _JUDGED)
        longest = max(len(asked.tokens) + _ANSWER, len(quoted.tokens)) - len(read.tokens)
        with read.prefill_once(self._bits, longest) as once:
            stored = once.stored()
            full = once.continue_with(asked.tail, len(asked.tail), go_on=_ANSWER)
            alone = once.continue_with(quoted.tail, len(quoted.at))
        none, answer = SELECTORS["none"], full.greedy_tokens
        noise.add(full, lab.full_prefill(asked.tokens, asked.at, piece=_NOISE_PIECE, answer=answer))
        exact.add(full, lab.reuse(asked.tokens, stored, [], none, 0.0, asked.at, answer=answer))
        first, placed = read.stored_in_order(order, self._bits)
        for arm, divergence in arms.items():
            repair = SELECTORS[arm.strategy]
            got = lab.reuse(asked.tokens, first, placed, repair, arm.ratio, asked.at, answer=answer)
            divergence.add(full, got)
            divergence.control(alone, lab.reuse(quoted.tokens, first, placed, repair, arm.ratio, quoted.at))

    def _finding(self, candidate: Candidate, d: _Divergence) -> Finding:
        return Finding(
            arm=f"{candidate.strategy} r={candidate.ratio:g}",
            bits=self._bits,
            strategy=candidate.strategy,
            ratio=candidate.ratio,
            kl_mean=float(np.mean(d.kl)),
            kl_p99=float(np.quantile(d.kl, 0.99)),
            top1_agreement=float(np.mean(d.same)),
            first_divergence=float(np.mean(d.first_differences)),
            control_kl=float(np.mean(d.control_kl)) if d.control_kl else 0.0,
            cost=float(np.mean(d.costs)),
            prompts=len(d.costs),
        )


class _Tail:
    """What follows documents, and the positions whose logits are judged: all of it, or the ``last`` so many."""

    def __init__(self, read: LabDocuments, tail: Sequence[int], last: int | None = None) -> None:
        self.tail = list(tail)
        self.tokens = read.tokens + self.tail
        self.at = np.arange(len(self.tokens) - (last or len(tail)), len(self.tokens))


def _quote(parts: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """Tokens from inside one of the documents."""
    part = list(rng.choice(parts))
    start = rng.randrange(max(1, len(part) - _QUOTED))
    return part[start : start + _QUOTED]


def divergence(full: LabResult, got: LabResult) -> tuple[list[float], list[bool]]:
    """For each judged position and each token of the answer: nats from full prefill, and whether the likeliest token is
    the same. The last position's logits are the answer's first."""
    pairs = ((full.logits, got.logits), (full.answer_logits[1:], got.answer_logits[1:]))
    kl: list[float] = []
    same: list[bool] = []
    for mine, theirs in pairs:
        p, q = mine.log_softmax(-1), theirs.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    return kl, same


class _Divergence:
    """Collects how far an arm is from full prefill."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.first_differences: list[int] = []
        self.costs: list[float] = []
        self.control_kl: list[float] = []

    def add(self, full: LabResult, got: LabResult) -> None:
        kl, same = divergence(full, got)
        self.kl += kl
        self.same += same
        self.costs.append(got.cost)
        # The likeliest token at every place of the same answer: a greedy one would differ from the first other one on.
        likeliest = got.answer_logits.argmax(-1).tolist()
        pairs = enumerate(zip(full.greedy_tokens, likeliest, strict=True))
        self.first_differences.append(next((i for i, (a, b) in pairs if a != b), len(full.greedy_tokens)))

    def must_fail(self, limits: Thresholds, total: int) -> bool:
        """Whether it fails whatever else is measured, of ``total`` predictions in all."""
        right = total - len(self.same) + sum(self.same)
        return sum(self.kl) > limits.max_kl * total or right / total < limits.min_agreement

    def control(self, full: LabResult, got: LabResult) -> None:
        self.control_kl += divergence(full, got)[0]
