"""Measures whether a model may reuse text that was read in another context.

Each prompt is documents and a question. The documents are stored as they were in another order, put into the prompt,
repaired, and compared with a full prefill over every token of the question and over the greedy tokens after it. The
report can fail; only a repair that passes is used by workers that are set to ``approximate=verified``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.errors import InvalidRequest

from inference_svc.reuse.laboratory import Laboratory, Outcome, another_order
from inference_svc.reuse.strategies import STRATEGIES

BUILT_IN = Path(__file__).parent / "verify_prompts.jsonl"
_GO_ON = 16
# Other sizes in which a prompt is read: what they change is the noise floor.
_NOISE_PIECE = 40


@dataclass(frozen=True)
class Question:
    """A prompt: documents in their order, then what is asked."""

    documents: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Thresholds:
    """What a repair must reach: mean divergence in nats per token, share of equal likeliest tokens."""

    max_kl: float = 0.05
    min_agreement: float = 0.95


@dataclass(frozen=True)
class Finding:
    """What one arm did. ``first_divergence`` is the mean number of equal greedy tokens, of 16."""

    arm: str
    bits: int
    strategy: str
    ratio: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    first_divergence: float
    passed: bool


@dataclass(frozen=True)
class Report:
    """All findings; ``noise_kl`` is what other piece sizes do to a full prefill. ``passed`` is that of the repair that
    was asked for."""

    model: str
    prompts: int
    noise_kl: float
    findings: tuple[Finding, ...]
    chosen: Finding

    @property
    def passed(self) -> bool:
        return self.chosen.passed

    @property
    def conclusive(self) -> bool:
        """Whether the prompts can tell anything: without repair, they do not pass."""
        return any(f.strategy == "none" and f.ratio > 0 and not f.passed for f in self.findings)

    def verdict(self) -> ReuseVerdict:
        """What is stored with the namespace."""
        f = self.chosen
        return ReuseVerdict(
            strategy=f.strategy,
            ratio=f.ratio,
            passed=f.passed,
            kl_mean=f.kl_mean,
            top1_agreement=f.top1_agreement,
            prompts=self.prompts,
            measured_at=int(time.time()),
        )

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed, "conclusive": self.conclusive}


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

    def __init__(self, lab: Laboratory, bits: int, thresholds: Thresholds = Thresholds()) -> None:
        self._lab, self._bits, self._thresholds = lab, bits, thresholds

    def run(
        self,
        questions: Sequence[Question],
        strategies: Sequence[str],
        ratio: float,
        compare: Sequence[str] = ("none",),
        progress: Callable[[], None] = lambda: None,
    ) -> Report:
        """Measures strategies, of which the first that passes is chosen (else the first of all), and, for comparison,
        others at the same ratio. Raises InvalidRequest."""
        if not questions or any(len(q.documents) < 2 or not q.question for q in questions):
            raise InvalidRequest("at least one prompt is needed, each with two documents or more and a question")
        arms = {name: _Divergence() for name in dict.fromkeys((*strategies, *compare))}
        exact, noise = _Divergence(), _Divergence()
        for number, question in enumerate(questions):
            self._measure(question, number, ratio, arms, exact, noise)
            progress()
        findings = [self._finding(f"{n} r={ratio:g}", n, ratio, d) for n, d in arms.items()]
        chosen = next((f for f in findings[: len(strategies)] if f.passed), findings[0])
        prefix = self._finding("exact prefix", "none", 0.0, exact)
        return Report(self._lab.loaded.id, len(questions), float(np.mean(noise.kl)), (prefix, *findings), chosen)

    def _measure(
        self,
        question: Question,
        seed: int,
        ratio: float,
        arms: dict[str, _Divergence],
        exact: _Divergence,
        noise: _Divergence,
    ) -> None:
        lab, tokenizer = self._lab, self._lab.loaded.tokenizer
        head = tokenizer("", add_special_tokens=True)["input_ids"] or [tokenizer.bos_token_id or 0]
        parts = [tokenizer(d + "\n\n", add_special_tokens=False)["input_ids"] for d in question.documents]
        asked = tokenizer(question.question, add_special_tokens=False)["input_ids"]
        read = lab.documents(head, parts)
        tokens = read.tokens + asked
        at = np.arange(len(read.tokens), len(tokens))
        full = lab.full(tokens, at, go_on=_GO_ON)
        noise.add(full, lab.full(tokens, at, piece=_NOISE_PIECE, go_on=_GO_ON))
        exact.add(full, lab.reuse(tokens, read.stored(self._bits), [], STRATEGIES["none"], 0.0, at, go_on=_GO_ON))
        first, placed = read.stored_in(another_order(len(parts), random.Random(seed)), self._bits)
        for name, divergence in arms.items():
            divergence.add(full, lab.reuse(tokens, first, placed, STRATEGIES[name], ratio, at, go_on=_GO_ON))

    def _finding(self, arm: str, strategy: str, ratio: float, d: _Divergence) -> Finding:
        kl, agreement = float(np.mean(d.kl)), float(np.mean(d.same))
        limits = self._thresholds
        return Finding(
            arm=arm,
            bits=self._bits,
            strategy=strategy,
            ratio=ratio,
            kl_mean=kl,
            kl_p99=float(np.quantile(d.kl, 0.99)),
            top1_agreement=agreement,
            first_divergence=float(np.mean(d.equal)),
            passed=kl <= limits.max_kl and agreement >= limits.min_agreement,
        )


class _Divergence:
    """Collects how far an arm is from full prefill."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.equal: list[int] = []

    def add(self, full: Outcome, got: Outcome) -> None:
        p, q = full.logits.log_softmax(-1), got.logits.log_softmax(-1)
        self.kl += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
        self.same += (p.argmax(-1) == q.argmax(-1)).tolist()
        pairs = zip(full.following, got.following, strict=True)
        self.equal.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(full.following)))
