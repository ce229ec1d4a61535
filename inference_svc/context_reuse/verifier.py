"""Verification of approximate reuse for a model: thresholds, measurement, report, verdict.

A prompt consists of documents and a question. The documents are stored in another order, relocated into the prompt and
selectively recomputed. The result is compared with a full prefill, at every token of the question and of the greedy
answer. In a control, a quote from one of the documents replaces the question. The quote needs no other document, so
reuse without recomputation is harmless for controls; recomputation must be harmless for them, too. A verification can
fail; workers with ``reuse_anywhere`` use only a selector that passed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict
from kvsidecar.errors import InvalidRequest

from inference_svc.context_reuse.question import Question
from inference_svc.context_reuse.selectors import (
    AUTO_SELECTORS,
    DEFAULT_RATIO,
    SELECTORS,
    THOROUGH_RATIO,
    THOROUGH_SELECTOR,
)

if TYPE_CHECKING:
    # These modules import torch, which `kvsidecar verify` does only after it has parsed its flags.
    from inference_svc.context_reuse.reuse_lab import LabDocuments, LabResult, ReuseLab
    from inference_svc.models.loader import LoadedModel

_ANSWER = 16
# The noise floor is the divergence between two full prefills; the second is computed in pieces of this many tokens.
_NOISE_PIECE = 40
# Number of tokens of a control's quote, and of its last tokens whose predictions are compared.
_QUOTED, _JUDGED = 32, 16

EXACT = "exact prefix"
Outcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True)
class Thresholds:
    """Limits that a selector must meet.

    On questions and answers, ``max_kl`` limits the mean KL divergence in nats per token; the share of equal top-1
    tokens must exceed ``min_agreement`` by its standard error. On controls, the selector's divergence may exceed that
    of no recomputation by at most ``max_harm`` nats. With fewer than ``min_prompts`` prompts it is inconclusive.
    """

    max_kl: float = 0.05
    min_agreement: float = 0.95
    max_harm: float = 0.01
    min_prompts: int = 8


@dataclass(frozen=True)
class Finding:
    """Measurements of one arm (a selector at a ratio) over ``prompts`` prompts and ``compared`` predictions.

    ``first_divergence``: mean number of greedy tokens, of 16, before the first that differs. ``control_kl``: mean
    divergence of the controls. ``cost``: rows times layers as a share of a prefill. ``why``: reason of a failure, or
    empty. An arm that can no longer pass gets no further prompts.
    """

    arm: str
    bits: int
    strategy: str
    ratio: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    first_divergence: float
    control_kl: float
    cost: float
    why: str = ""
    prompts: int = 0
    compared: int = 0

    @property
    def passed(self) -> bool:
        return not self.why


def failure_reason(finding: Finding, none: Finding, limits: Thresholds) -> str:
    """Reason why an arm fails, compared with reuse without recomputation; empty if it passes."""
    if finding.kl_mean > limits.max_kl:
        return f"KL {finding.kl_mean:.3g} is more than {limits.max_kl:g}"
    least = limits.min_agreement
    error = (least * (1 - least) / finding.compared) ** 0.5 if finding.compared else 0.0
    if finding.top1_agreement < least + error:
        return f"agreement {finding.top1_agreement:.3g} is less than {least:g} with a standard error of {error:.2g}"
    if finding.control_kl > none.control_kl + limits.max_harm:
        return f"harms controls: KL {finding.control_kl:.3g}, without repair {none.control_kl:.3g}"
    return ""


@dataclass(frozen=True)
class Report:
    """All findings of a verification.

    ``noise_kl`` is the divergence between two full prefills in pieces of different sizes. ``chosen`` is the cheapest
    candidate that passes; if no candidate passes, the candidate with the smallest divergence.
    """

    model: str
    prompts: int
    noise_kl: float
    findings: tuple[Finding, ...]
    chosen: Finding
    thresholds: Thresholds

    @property
    def outcome(self) -> Outcome:
        if self.inconclusive_reason:
            return "inconclusive"
        return "passed" if self.chosen.passed else "failed"

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"

    @property
    def conclusive(self) -> bool:
        return self.outcome != "inconclusive"

    @property
    def inconclusive_reason(self) -> str:
        """Reason why these prompts are inconclusive; empty if they are conclusive."""
        if self.prompts < self.thresholds.min_prompts:
            return f"{self.prompts} prompts are too few, at least {self.thresholds.min_prompts} are needed"
        none = next(f for f in self.findings if f.strategy == "none" and f.arm != EXACT)
        if none.passed:
            return "reuse without any repair passes as well, so that these prompts need no other document's context"
        return ""

    @property
    def sentence(self) -> str:
        """Summary for operators in one sentence: what the verdict means for the workers' reuse."""
        exact = next(f for f in self.findings if f.arm == EXACT)
        known = f"Prefixes that were read before are reused (KL {exact.kl_mean:.2g} with {exact.bits}-bit storage)"
        c = self.chosen
        if self.passed:
            return (
                f"{known}, and so is text that was read in another context, repaired by {c.strategy}, which computes "
                f"{c.ratio:.0%} of its tokens again (KL {c.kl_mean:.2g}, agreement {c.top1_agreement:.1%})."
            )
        sooner = f" after {c.prompts} of them, which no other could make good" if 0 < c.prompts < self.prompts else ""
        closest = f"no repair passed, and {c.strategy} at {c.ratio:g}, the closest, does not: {c.why}{sooner}"
        why = self.inconclusive_reason or closest
        return f"{known}; text that was read in another context is not reused: {why}."

    def verdict(self) -> ReuseVerdict:
        """Build the verdict to store with the namespace."""
        c = self.chosen
        return ReuseVerdict(
            strategy=c.strategy,
            ratio=c.ratio,
            passed=self.passed,
            kl_mean=c.kl_mean,
            top1_agreement=c.top1_agreement,
            prompts=c.prompts or self.prompts,
            measured_at=int(time.time()),
            cost=c.cost,
            reason="" if self.passed else self.inconclusive_reason or c.why,
        )

    def as_dict(self) -> dict[str, object]:
        found = asdict(self)
        found["findings"] = [{**asdict(f), "passed": f.passed} for f in self.findings]
        found["chosen"]["passed"] = self.chosen.passed
        more = {"passed": self.passed, "conclusive": self.conclusive, "outcome": self.outcome}
        return {**found, **more, "sentence": self.sentence}


@dataclass(frozen=True)
class Candidate:
    """A selector to verify, and its share of the relocated tokens."""

    strategy: str
    ratio: float


def candidates(repair: str, ratio: float | None = None) -> tuple[Candidate, ...]:
    """List the candidate repairs for a worker's settings ``repair`` and ``repair_ratio``.

    ``auto`` gives several selectors; a ratio of None gives the default ratios.
    """
    names = AUTO_SELECTORS if repair == "auto" else (repair,)
    found = [Candidate(name, DEFAULT_RATIO if ratio is None else ratio) for name in names]
    if ratio is None and THOROUGH_SELECTOR in names:
        found.append(Candidate(THOROUGH_SELECTOR, THOROUGH_RATIO))
    return tuple(found)


def longest_prompt(loaded: LoadedModel, questions: Sequence[Question]) -> int:
    """Count the tokens of the longest prompt with its answer. Raises InvalidRequest beyond the context length."""
    longest = 0
    for number, question in enumerate(questions, 1):
        head, parts, asked = _tokenize(loaded, question)
        tokens = len(head) + sum(map(len, parts)) + max(len(asked) + _ANSWER, _QUOTED)
        if tokens > loaded.context_length:
            raise InvalidRequest(
                f"prompt {number} has {tokens} tokens with its answer; the model's context length is "
                f"{loaded.context_length}"
            )
        longest = max(longest, tokens)
    return longest


def _tokenize(loaded: LoadedModel, question: Question) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the tokens before the first document, those of each document, and those of the question."""
    tokenizer = loaded.tokenizer
    head = tokenizer("", add_special_tokens=True)["input_ids"] or [tokenizer.bos_token_id or 0]
    texts = [*(document + "\n\n" for document in question.documents), question.question]
    *parts, asked = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return head, parts, asked


class Verifier:
    """Verification of one model at one storage width."""

    def __init__(self, lab: ReuseLab, bits: int, thresholds: Thresholds | None = None) -> None:
        self._lab, self._bits, self._thresholds = lab, bits, thresholds or Thresholds()

    def run(
        self,
        questions: Sequence[Question],
        candidates: Sequence[Candidate],
        compare: Sequence[str] = (),
        progress: Callable[[], None] = lambda: None,
    ) -> Report:
        """Measure candidates and choose the cheapest that passes. Raises InvalidRequest.

        For comparison it also measures ``none``, and the selectors ``compare`` at the first candidate's ratio.
        ``progress`` is called after each prompt.
        """
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
        """Number of compared predictions of a question and its answer."""
        return len(_tokenize(self._lab.loaded, question)[2]) + _ANSWER - 1

    def _undecided_arms(
        self, arms: dict[Candidate, _Divergence], none: Candidate, total: int
    ) -> dict[Candidate, _Divergence]:
        """Select the arms whose result further prompts can change.

        A divergence is never negative, so an arm has failed as soon as its sum exceeds ``max_kl`` times ``total``
        predictions. The arm without recomputation runs while any other arm may pass, for comparison.
        """
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
        lab, rng = self._lab, random.Random(seed)
        head, parts, wanted = _tokenize(lab.loaded, question)
        read = lab.documents(head, parts)
        asked, order = _Tail(read, wanted), shuffled_order(len(parts), rng)
        quote = _quote(parts, rng)
        quoted = _Tail(read, quote, min(_JUDGED, len(quote)))
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
            compared=len(d.same),
        )


class _Tail:
    """A prompt with ``tail`` after its documents. The logits at the positions ``at`` are compared."""

    def __init__(self, read: LabDocuments, tail: Sequence[int], last: int | None = None) -> None:
        self.tail = list(tail)
        self.tokens = read.tokens + self.tail
        self.at = np.arange(len(self.tokens) - (last or len(tail)), len(self.tokens))


def shuffled_order(count: int, rng: random.Random) -> list[int]:
    """Return a random order of ``count`` documents, but not the original. Raises ValueError for fewer than two."""
    if count < 2:
        raise ValueError(f"{count} documents have no other order")
    order = list(range(count))
    while order == sorted(order):
        rng.shuffle(order)
    return order


def _quote(parts: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """Quote ``_QUOTED`` consecutive tokens of a random document."""
    part = list(rng.choice(parts))
    start = rng.randrange(max(1, len(part) - _QUOTED))
    return part[start : start + _QUOTED]


def divergence(full: LabResult, got: LabResult) -> tuple[list[float], list[bool]]:
    """Compute KL divergence (nats) and top-1 agreement with a full prefill.

    It returns both for each compared position and answer token. The logits of the last position already predict the
    first token of the answer, so the answer's first logits are left out.
    """
    pairs = ((full.logits, got.logits), (full.answer_logits[1:], got.answer_logits[1:]))
    kl, same = list[float](), list[bool]()
    for mine, theirs in pairs:
        p, q = mine.log_softmax(-1), theirs.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    return kl, same


class _Divergence:
    """Divergence from full prefill, collected over all prompts."""

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
        # Top-1 tokens along the same answer, up to the first difference: a greedy answer would diverge there.
        likeliest = got.answer_logits.argmax(-1).tolist()
        pairs = enumerate(zip(full.greedy_tokens, likeliest, strict=True))
        self.first_differences.append(next((i for i, (a, b) in pairs if a != b), len(full.greedy_tokens)))

    def must_fail(self, limits: Thresholds, total: int) -> bool:
        """True if no result of the missing predictions (there are ``total`` in all) can let the arm pass."""
        right = total - len(self.same) + sum(self.same)
        return sum(self.kl) > limits.max_kl * total or right / total < limits.min_agreement

    def control(self, full: LabResult, got: LabResult) -> None:
        self.control_kl += divergence(full, got)[0]
